"""Hugging Face <-> Megatron-Core: names and cuts of each family, as tables."""

from fivefold.megatron.bridge.hf_weights import SafetensorsSource, load_parameters
from fivefold.megatron.bridge.mapping import FAMILY_TABLES, Row, mapped_names
from fivefold.megatron.bridge.stream import WeightStream

__all__ = ["FAMILY_TABLES", "Row", "SafetensorsSource", "WeightStream", "load_parameters", "mapped_names"]
