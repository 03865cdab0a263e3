"""Hugging Face <-> Megatron-Core: loading slices of files, streaming full tensors, by the tables of the families."""

from fivefold.megatron.bridge.hf_weights import SafetensorsSource, Source, load_adapters, load_parameters
from fivefold.megatron.bridge.stream import WeightStream
from fivefold.megatron.bridge.torch_dist import TorchDistSource

__all__ = ["SafetensorsSource", "Source", "TorchDistSource", "WeightStream", "load_adapters", "load_parameters"]
