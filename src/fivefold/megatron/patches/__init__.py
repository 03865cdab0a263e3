"""Patches that let Megatron-Core run without Transformer Engine and without CUDA."""
