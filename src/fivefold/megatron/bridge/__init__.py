"""Hugging Face <-> Megatron-Core: loads slices of files and streams full tensors, by the tables of the model families."""

from fivefold.megatron.bridge.hf_weights import SafetensorsSource, Source, load_adapters, load_parameters
from fivefold.megatron.bridge.stream import WeightStream
from fivefold.megatron.bridge.torch_dist import TorchDistSource

__all__ = ["SafetensorsSource", "Source", "TorchDistSource", "WeightStream", "load_adapters", "load_parameters"]
