"""Fivefold: RL post-training of language models on Megatron-Core, five-fold parallel."""

__version__ = "0.1.0"
