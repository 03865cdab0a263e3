"""SGLang as servers; only this package imports it. Modules shared by clients, `fivefold check` and servers do not need
SGLang."""
