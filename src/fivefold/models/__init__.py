"""Models: their specifications, and the supported families. No torch here."""
