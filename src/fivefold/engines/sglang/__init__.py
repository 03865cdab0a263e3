"""SGLang as servers; the only room that imports it. What a client, `fivefold check` and a server share needs no SGLang."""
