"""Packages that some choices need and that are not installed with the project. No torch here."""

from __future__ import annotations

import importlib.util

TRANSFORMER_IMPL = {"torch": (), "auto": (), "transformer_engine": ("transformer_engine",)}
LAUNCHERS = {"auto": (), "local": (), "ray": ("ray",)}
TRACKERS = {name: (name,) for name in ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")}
BRIDGES = {"native": (), "mbridge": ("mbridge",), "megatron-bridge": ("megatron.bridge", "transformer_engine", "modelopt")}


def missing_packages(names: tuple[str, ...]) -> list[str]:
    """Those of the packages that are not installed."""

    def installed(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            return False

    return [name for name in names if not installed(name)]
