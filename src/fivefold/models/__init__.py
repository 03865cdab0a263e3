"""What a model is: its sizes, and the families that are known. No torch here."""
