"""Typed configuration: YAML and overrides -> RunConfig. No torch here."""

from fivefold.config.loader import ConfigError, dump_yaml
from fivefold.config.run_config import RunConfig

__all__ = ["ConfigError", "RunConfig", "dump_yaml"]
