"""What a model is: its sizes, and the families that are supported. No torch here."""
