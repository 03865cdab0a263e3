"""Megatron-Core's layers in plain PyTorch."""
