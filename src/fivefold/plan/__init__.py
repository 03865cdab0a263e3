"""Resources that a run needs, computed before it starts. No torch here."""
