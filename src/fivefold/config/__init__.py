"""Typed configuration: YAML and overrides -> RunConfig. No torch here."""

from fivefold.config.loader import ConfigError, config_of, dump_yaml, load_config, make_config, restore
from fivefold.config.run_config import RunConfig

__all__ = ["ConfigError", "RunConfig", "config_of", "dump_yaml", "load_config", "make_config", "restore"]
