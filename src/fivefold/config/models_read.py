"""Models that a run reads, and which of their files."""

from __future__ import annotations

from fivefold.config.run_config import RunConfig

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
    code = ("*.py",) if model.trust_remote_code else ()
    return {name: (*patterns, *code) for name, patterns in files.items()}
