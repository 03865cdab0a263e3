"""Trains the models of transformers: FSDP2 shards them, attention, head, packing and loss are ours."""
