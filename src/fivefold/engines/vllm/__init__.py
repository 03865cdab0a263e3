"""Integration of vLLM: no other package imports it."""
