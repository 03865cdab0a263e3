"""Packages that some choices need and that are not installed with the project. No torch here."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

TRANSFORMER_IMPL = {"torch": (), "auto": (), "transformer_engine": ("transformer_engine",)}
LAUNCHERS = {"auto": (), "local": (), "ray": ("ray",)}
TRACKERS = {name: (name,) for name in ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")}
BRIDGES = {"native": (), "mbridge": ("mbridge",), "megatron-bridge": ("megatron.bridge", "transformer_engine", "modelopt")}


@dataclass(frozen=True)
class Extra:
    """Packages that some choices need: `pip install 'fivefold[NAME]'`."""

    name: str
    package: str
    """The distribution whose version counts."""
    serves: str
    """What it is for."""


EXTRAS = (
    Extra("vllm", "vllm", "engine.backend: vllm"),
    Extra("flash", "flash-attn-4", "attention twice as fast on Hopper and later"),
    Extra("ray", "ray", "launch.backend: ray"),
    Extra("mbridge", "mbridge", "policy.megatron.bridge_type: mbridge"),
    Extra("modelscope", "modelscope", "model.path: modelscope:OWNER/NAME"),
    Extra("ifeval", "py3langid", "reward ifeval: the language of a response"),
    Extra("wandb", "wandb", "trainer.loggers: [wandb]"),
    Extra("mlflow", "mlflow-skinny", "trainer.loggers: [mlflow]"),
    Extra("swanlab", "swanlab", "trainer.loggers: [swanlab]"),
    Extra("trackio", "trackio", "trainer.loggers: [trackio]"),
)
"""Those of pyproject.toml that users install; `fivefold doctor` says which are missing."""


def missing_packages(names: tuple[str, ...]) -> list[str]:
    """Those of the packages that are not installed."""

    def installed(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            return False

    return [name for name in names if not installed(name)]


def has_flash_attention() -> bool:
    """flash-attn-4 is installed. It is not imported: FlashAttention 2, which has the same name, imports torch."""
    found = importlib.util.find_spec("flash_attn")
    places = (found.submodule_search_locations or ()) if found is not None else ()
    return any((Path(place) / "cute").is_dir() for place in places)
