"""Models and data sets that a run reads from a hub. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fivefold.config import RunConfig
from fivefold.data.data_sets import cache_of, hub_names, local_file
from fivefold.hub import model_snapshot

_TOKENIZER_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "tokenizer*")
_MODEL_FILES = ("*.safetensors", *_TOKENIZER_FILES)


def models_read(config: RunConfig) -> dict[str, tuple[str, ...]]:
    """Return directory or hub id of every model that the run reads -> patterns of the files that it reads there."""
    model, roles = config.model, config.roles
    judge = [config.reward.judge.model] if config.may_generate and config.reward.judge_layout else []
    adapters = [role.settings.lora.path for role in roles.learners.values() if role.settings.lora.rank]
    paths = [path for path in [model.path, *(role.path for role in roles.values()), *judge, *adapters] if path]
    described = dict.fromkeys([model.tokenizer_path, *map(model.described_by, paths)], _TOKENIZER_FILES)
    files = {**described, **dict.fromkeys(paths, _MODEL_FILES)}
    if model.trust_remote_code:
        files[model.tokenizer_path] = (*files[model.tokenizer_path], "*.py")
    return files


def download(config: RunConfig, commits: Mapping[str, str]) -> None:
    """Download what the run reads into this machine's caches, at the commit in `commits` or else the latest."""
    for name, wanted in models_read(config).items():
        if not Path(name).is_dir():
            model_snapshot(name, wanted, commits.get(name))
    for key, name in hub_names(config.data):
        local_file(name, key, cache_of(config.data), commits.get(name))
