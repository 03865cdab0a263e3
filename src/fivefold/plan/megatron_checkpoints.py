"""Checks of weights in a Megatron-Core checkpoint: whether the model may load one, and which file describes the model."""

from __future__ import annotations

from pathlib import Path

from fivefold.config.roles import Role
from fivefold.config.schema import ModelConfig
from fivefold.keys.findings import Findings
from fivefold.plan.tokenizer_files import is_hub_id


def has_config(findings: Findings, model: ModelConfig, role: Role) -> bool:
    """Return whether a role's checkpoint has a config.json to read a model from; otherwise report an error or note."""
    key, path, bridge = role.path_key, role.path, role.settings.megatron.bridge_type
    described = model.described_by(path)

    if bridge != "native":
        must = f"a Hugging Face directory for bridge_type {bridge}"
        findings.error(key, f"must be {must}: got a checkpoint of Megatron-Core, {path}")
    elif (Path(described) / "config.json").is_file():
        return True
    elif model.config is None:
        needs = "name the Hugging Face directory or hub id of its model in model.config"
        findings.error(key, f": no config.json in the checkpoint of Megatron-Core {path} or above it: {needs}")
    elif Path(described).is_dir() or not is_hub_id(described):
        findings.error("model.config", f": no config.json in {described}, and no hub id, which is written owner/name")
    else:
        findings.note(
            f"config.json of {described} is not here: it will be taken from the hub, and its sizes are not checked"
        )
    return False
