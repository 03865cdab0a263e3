"""The bodies of subcommands that are more than a call."""
