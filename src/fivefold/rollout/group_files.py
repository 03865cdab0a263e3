"""Groups that wait to be trained on <-> safetensors files: one for each rank, which any number of ranks can read."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fivefold.files import writing
from fivefold.types import Sample

_FIELDS = ("text", "finished", "policy_version", "reward_parts", "correct", "reward_failed")


def write_groups(path: Path, groups: Mapping[int, list[Sample]], scored: Collection[int]) -> None:
    """Samples by the place of their group in the run; `scored`: places whose samples have their rewards."""
    samples = [sample for group in groups.values() for sample in group]
    described = {
        "groups": {place: len(group) for place, group in groups.items()},
        "scored": sorted(scored),
        "samples": [
            {
                "tokens": len(sample.token_ids),
                "has_versions": sample.token_versions is not None,
                "routes": None if sample.routes_TLK is None else len(sample.routes_TLK),
                "reward": None if math.isnan(sample.reward) else sample.reward,
                **{name: getattr(sample, name) for name in _FIELDS},
            }
            for sample in samples
        ],
    }
    tensors = {
        "token_ids_T": torch.tensor([token for sample in samples for token in sample.token_ids], dtype=torch.int32),
        "logprobs_T": torch.tensor([number for sample in samples for number in sample.logprobs], dtype=torch.float64),
        "versions_T": torch.tensor(
            [version for sample in samples for version in sample.token_versions or ()], dtype=torch.int64
        ),
    }
    if routes := [sample.routes_TLK for sample in samples if sample.routes_TLK is not None]:
        tensors["routes_TLK"] = torch.cat(routes)
    with writing(path):
        save_file(tensors, path, metadata={"described": json.dumps(described)})


def read_groups(path: Path) -> tuple[dict[int, list[Sample]], set[int]]:
    """What `write_groups` wrote."""
    with safe_open(path, framework="pt") as file:
        described = json.loads(file.metadata()["described"])
        token_ids, logprobs, versions = (
            iter(file.get_tensor(name).tolist()) for name in ("token_ids_T", "logprobs_T", "versions_T")
        )
        counts = [found["routes"] for found in described["samples"] if found.get("routes") is not None]
        routes = iter(file.get_tensor("routes_TLK").split(counts) if counts else ())

    def sample(found: dict[str, Any]) -> Sample:
        length = range(found["tokens"])
        return Sample(
            token_ids=[next(token_ids) for _ in length],
            logprobs=[next(logprobs) for _ in length],
            token_versions=[next(versions) for _ in length] if found["has_versions"] else None,
            # A copy: a view would keep those of all samples.
            routes_TLK=None if found.get("routes") is None else next(routes).clone(),
            reward=math.nan if found["reward"] is None else found["reward"],
            **{name: found[name] for name in _FIELDS},
        )

    samples = map(sample, described["samples"])
    groups = {int(place): [next(samples) for _ in range(count)] for place, count in described["groups"].items()}
    return groups, set(described["scored"])
