"""What every trainer needs, whatever library shards its model: packing, micro-batches, log-probs, schedule, checkpoints.

`megatron/` and `fsdp/` are built on it; it knows neither.
"""
