"""The one door to Megatron-Core."""
