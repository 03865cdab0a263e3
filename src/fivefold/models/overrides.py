"""Changes of a model's config.json: (directory, key -> value) -> a directory with the changed file. No torch here."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fivefold.errors import UserError
from fivefold.files import user_cache, write_text
from fivefold.keys.ranges import suggest
from fivefold.models.config_json import read_config


def overridden(directory: Path, overrides: Mapping[str, Any]) -> Path:
    """Return a directory with the files of `directory`, linked, and its config.json with these values.

    It is in the user's cache, once for each content, so every process on a machine finds the same one. Raises UserError for
    a key that config.json does not have.
    """
    config = read_config(directory)
    if unknown := [key for key in overrides if key not in config]:
        raise UserError(
            f"model.overrides.{unknown[0]}: config.json in {directory} has no such key, so no model would read it"
            f"{suggest(unknown[0], list(config))}"
        )
    pairs = {key: (config[key], value) for key, value in overrides.items()}
    both = {key: old | new for key, (old, new) in pairs.items() if isinstance(old, dict) and isinstance(new, dict)}
    text = json.dumps(config | dict(overrides) | both, indent=2)
    names = sorted(path.name for path in directory.iterdir() if path.name != "config.json")
    number = hashlib.sha256(json.dumps([str(directory.resolve()), names, text]).encode()).hexdigest()[:16]
    cache = user_cache("models")
    cached = cache / f"{directory.name}-{number}"
    if not cached.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=cache))
        for name in names:
            (partial / name).symlink_to((directory / name).resolve())
        write_text(partial / "config.json", text)
        try:
            partial.rename(cached)
        except OSError:
            # Another process of the run was faster.
            shutil.rmtree(partial)
    return cached
