"""What a run shows and writes down."""
