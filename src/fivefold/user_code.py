"""Functions of the user's own, named `path/to/file.py:function`. No torch here."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any


def is_user_code(name: str) -> bool:
    """Whether a name stands for a function in a file of the user's."""
    return ":" in name


def check_user_code(name: str) -> None:
    """Raise ValueError for a name that `load_user_code` would not find; runs none of the user's code."""
    path, _, function = name.rpartition(":")
    if not Path(path).is_file():
        raise ValueError(f"{name!r}: no file at {path}")
    if not re.search(
        rf"^\s*(?:def|async def)\s+{re.escape(function)}\b|^{re.escape(function)}\s*=", Path(path).read_text(), re.M
    ):
        raise ValueError(f"{name!r}: {path} defines no {function}")


def load_user_code(name: str) -> Any:
    """The function of `path/to/file.py:function`."""
    check_user_code(name)
    path, _, function = name.rpartition(":")
    spec = importlib.util.spec_from_file_location(f"fivefold_user_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)
