"""What a run needs, said before it starts. No torch here."""
