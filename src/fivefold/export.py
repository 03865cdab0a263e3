"""A checkpoint -> a Hugging Face directory that transformers and vLLM load."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from fivefold.checkpoint import damage
from fivefold.config import load_config
from fivefold.launch.local import free_port
from fivefold.layout import ParallelLayout
from fivefold.megatron import mesh
from fivefold.megatron.model import MegatronModel
from fivefold.ranks import Ranks

_COPIED = ("*.json", "*.jinja", "*.txt", "*.model")


def export(checkpoint: Path, out: Path, shard_gb: float) -> str:
    """Write `checkpoint` to the new directory `out` in one process; a sentence about what was written."""
    if faults := damage(checkpoint):
        raise ValueError(f"checkpoint {checkpoint} cannot be used: {faults}")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: choose a new directory")
    config = load_config(checkpoint / "run.yaml")
    directory = Path(config.model.path)
    if not directory.is_dir():
        from huggingface_hub import snapshot_download

        directory = Path(snapshot_download(config.model.path, ignore_patterns=["*.safetensors", "*.bin"]))
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    device = torch.device("cpu")
    mesh.init_process_group(device, timeout_minutes=10)
    try:
        whole = mesh.build_mesh(Ranks(ParallelLayout()), device, seed=0, timeout_minutes=10)
        # One process holds the whole model: what cut it into stages does not apply.
        policy = replace(config.policy, megatron=replace(config.policy.megatron, pipeline={}))
        model = MegatronModel(directory, policy, whole, read_weights=False)
        model.load(checkpoint / "policy")
        out.mkdir(parents=True, exist_ok=True)
        files, total = write_safetensors(model.weights(), out, int(shard_gb * 2**30))
    finally:
        mesh.destroy()
    for pattern in _COPIED:
        for path in directory.glob(pattern):
            if path.name != "model.safetensors.index.json":
                shutil.copy(path, out / path.name)
    return f"{out}: {total / 2**20:,.1f} MiB of weights in {files} file{'s' if files > 1 else ''}"


def write_safetensors(weights: Iterable[tuple[str, Tensor]], out: Path, limit: int) -> tuple[int, int]:
    """Write (name, tensor) pairs into files of at most `limit` bytes, with an index when there are several."""
    shards: list[dict[str, Tensor]] = [{}]
    filled = total = 0
    for name, tensor in weights:
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and filled + size > limit:
            _write_shard(shards[-1], out, len(shards))
            shards[-1] = dict.fromkeys(shards[-1], torch.empty(0))
            shards.append({})
            filled = 0
        shards[-1][name] = tensor.detach().cpu().contiguous().clone()
        filled += size
        total += size
    _write_shard(shards[-1], out, len(shards))
    if len(shards) == 1:
        (out / _shard(1)).rename(out / "model.safetensors")
        return 1, total
    place = {}
    for number, shard in enumerate(shards, 1):
        final = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (out / _shard(number)).rename(out / final)
        place.update(dict.fromkeys(shard, final))
    index = {"metadata": {"total_size": total}, "weight_map": place}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return len(shards), total


def _shard(number: int) -> str:
    return f".shard-{number}.safetensors"


def _write_shard(tensors: dict[str, Tensor], out: Path, number: int) -> None:
    save_file(tensors, out / _shard(number), metadata={"format": "pt"})
