"""What samples responses."""
