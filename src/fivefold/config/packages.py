"""Optional packages, which some choices need and the project does not install. No torch here."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from fivefold.errors import first_line
from fivefold.files import user_cache, users_umask

NOT_INSTALLED = "not installed here"
FLASH = "flash_attn.cute"
"""Module of flash-attn-4."""
KERNELS = {
    FLASH: "attention is PyTorch's, which is slower",
    "triton": "PyTorch's operations take the place of its kernels, which is slower",
    "transformer_engine": "layers are those of PyTorch",
}
"""Packages with faster GPU kernels -> what happens without them."""
_SECONDS = 120
_TRY = """
import importlib, sys
from fivefold.stand_ins import stand_ins
try:
    with stand_ins(*sys.argv[2:]):
        importlib.import_module(sys.argv[1])
except BaseException as error:
    sys.exit(print(type(error).__name__, str(error).partition(chr(10))[0], sep=': ') or 1)
"""

TRANSFORMER_IMPL = {"torch": (), "auto": (), "transformer_engine": ("transformer_engine",)}
LAUNCHERS = {"auto": (), "local": (), "ray": ("ray",)}
TRACKERS = {name: (name,) for name in ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")}
BRIDGES = {"native": (), "mbridge": ("mbridge",), "megatron-bridge": ("megatron.bridge",)}
STAND_INS = {"megatron.bridge": ("transformer_engine", "triton")}
"""Package -> packages that its import needs and that the project never calls: `stand_ins` serves if they are missing."""


@dataclass(frozen=True)
class Extra:
    """An extra, installed with `pip install 'fivefold[NAME]'`, for choices that need its package."""

    name: str
    package: str
    """The distribution whose version counts."""
    serves: str
    """The choice or feature that needs the package."""
    module: str
    """The module to import."""


EXTRAS = (
    Extra("vllm", "vllm", "engine.backend: vllm", "vllm"),
    Extra("flash", "flash-attn-4", "attention twice as fast on Hopper and later", FLASH),
    Extra("ray", "ray", "launch.backend: ray", "ray"),
    Extra("mbridge", "mbridge", "policy.megatron.bridge_type: mbridge", "mbridge"),
    Extra("modelscope", "modelscope", "model.path and data.train: modelscope:OWNER/NAME", "modelscope_hub"),
    Extra("ifeval", "py3langid", "reward ifeval: the language of a response", "py3langid"),
    Extra("datasets", "datasets", "data.train: OWNER/NAME, a data set of a hub", "datasets"),
    Extra("wandb", "wandb", "trainer.loggers: [wandb]", "wandb"),
    Extra("mlflow", "mlflow-skinny", "trainer.loggers: [mlflow]", "mlflow"),
    Extra("swanlab", "swanlab", "trainer.loggers: [swanlab]", "swanlab"),
    Extra("trackio", "trackio", "trainer.loggers: [trackio]", "trackio"),
)
"""Extras of pyproject.toml that users install; `fivefold doctor` lists the missing ones."""


def supported_versions() -> dict[str, str]:
    """Return package -> its supported versions, from Fivefold's own requirements."""
    try:
        requirements = [Requirement(text) for text in importlib.metadata.requires("fivefold") or []]
    except importlib.metadata.PackageNotFoundError:
        return {}
    versions: dict[str, str] = {}
    for one in requirements:
        versions.setdefault(one.name, str(one.specifier))
    return versions


def fits(version: str, supported: str) -> bool:
    """Whether a version is one of the supported ones; a local part (`+cpu`) does not count."""
    try:
        return SpecifierSet(supported).contains(version.partition("+")[0], prereleases=True)
    except InvalidVersion:
        return False


def release_fault(name: str) -> str:
    """Return why the installed version of a required package cannot be used, with the line that installs another, or ""."""
    supported = supported_versions().get(name, "")
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"{name} is not installed: pip install '{name}{supported}'"
    if fits(version, supported):
        return ""
    return f"{name} {version} is installed, supported is {supported}: pip install '{name}{supported}'"


@cache
def transformers_has(family: str) -> bool:
    """Whether the installed transformers lists a `model_type`, by its file, which is not imported; True without the file."""
    spec = importlib.util.find_spec("transformers")
    lists = [Path(place) / "models/auto/modeling_auto.py" for place in (spec and spec.submodule_search_locations) or ()]
    return not any(path.is_file() for path in lists) or any(f'("{family}", ' in path.read_text() for path in lists)


def missing_packages(names: tuple[str, ...]) -> list[str]:
    """Return the packages that cannot be used, each with the reason: not installed, or its import fails."""
    with ThreadPoolExecutor() as tries:
        faults = list(tries.map(import_fault, names))
    return [f"{name}, {fault}" for name, fault in zip(names, faults, strict=True) if fault is not None]


def import_fault(name: str, is_fresh: bool = False) -> str | None:
    """Return why a package cannot be used here, or None; its import is tried in a separate process.

    Importing vLLM takes 15 s on some machines. So a success is remembered in the user's cache until something is installed
    next to the package or to torch; a fault never is. `is_fresh` tries the import in any case.
    """
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return NOT_INSTALLED
    if not is_fresh and (known := _record_of_import(name, spec)) is not None and known.exists():
        return None
    fault = _failed_import(name, tuple(sys.path))
    # The first import may write compiled code next to a module.
    if fault is None and (record := _record_of_import(name, spec)) is not None:
        with suppress(OSError), users_umask():
            record.parent.mkdir(parents=True, exist_ok=True)
            record.touch()
    return fault


def _record_of_import(name: str, spec: ModuleSpec) -> Path | None:
    """Return the file that exists once this import has succeeded with what is installed now; None without a home directory.

    Installing or removing a package changes the directory that it is in, which counts for the package's own and for torch's.
    """
    specs = [spec, importlib.util.find_spec("torch")]
    places = [place for one in specs if one for place in one.submodule_search_locations or [one.origin or ""]]
    parents = [parent for parent in (Path(place).parent for place in places) if parent.is_dir()]
    changed = [[str(parent), parent.stat().st_mtime_ns] for parent in parents]
    # The first entry is where the command's script is, or the working directory of a rank: both take the same packages.
    path = sys.path if sys.flags.safe_path else sys.path[1:]
    facts = [name, platform.node(), sys.executable, sys.version, path, changed]
    try:
        return user_cache("imports") / hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    except RuntimeError:
        return None


@cache
def _failed_import(name: str, path: tuple[str, ...]) -> str | None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRY, name, *STAND_INS.get(name, ())],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"whose import has not ended after {_SECONDS} s"
    if done.returncode == 0:
        return None
    ending = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return f"whose import fails: {(done.stdout.strip().splitlines() or [ending])[-1]}"


def flash_fault(is_fresh: bool = False) -> str | None:
    """Return why flash-attn-4 cannot be used, or None. FlashAttention 2 has the same package, without `cute`."""
    spec = importlib.util.find_spec("flash_attn")
    places = (spec.submodule_search_locations or ()) if spec is not None else ()
    return import_fault(FLASH, is_fresh) if any((Path(place) / "cute").is_dir() for place in places) else NOT_INSTALLED


def slower_paths(is_fresh: bool = False) -> list[str]:
    """Return a line for each package of `KERNELS` that is installed but cannot be imported."""
    faults = {name: flash_fault(is_fresh) if name == FLASH else import_fault(name, is_fresh) for name in KERNELS}
    return [f"{name}, {fault}: {KERNELS[name]}" for name, fault in faults.items() if fault not in (None, NOT_INSTALLED)]


@cache
def can_import(name: str) -> bool:
    """Import a package of `KERNELS` in this process; if it is installed but the import fails, rank 0 prints why."""
    try:
        importlib.import_module(name)
    except Exception as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name in (name, name.partition(".")[0])
        if not is_absent and os.environ.get("RANK", "0") == "0":
            print(f"{name}, whose import fails: {first_line(error)}: {KERNELS[name]}", file=sys.stderr, flush=True)
        return False
    return True
