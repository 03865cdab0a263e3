"""Keys of a configuration: their ranges, how they identify a run, and what is found wrong with them. No torch here."""
