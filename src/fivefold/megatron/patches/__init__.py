"""What Megatron-Core needs to run without Transformer Engine and without CUDA."""
