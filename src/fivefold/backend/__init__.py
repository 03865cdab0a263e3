"""Code that both trainers use, whichever library shards the model: packing, micro-batches, log-probs, schedule, checkpoints.

`megatron/` and `fsdp/` import this room; it imports neither.
"""
