"""Hugging Face <-> Megatron-Core: names and cuts of each family, as tables."""

from fivefold.megatron.bridge.families import FAMILY_TABLES, Row, mapped_names
from fivefold.megatron.bridge.load import SafetensorsSource, load_parameters
from fivefold.megatron.bridge.stream import WeightStream

__all__ = ["FAMILY_TABLES", "Row", "SafetensorsSource", "WeightStream", "load_parameters", "mapped_names"]
