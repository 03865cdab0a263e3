"""Bodies of the subcommands that are more than one call."""
