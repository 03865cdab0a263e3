"""Checkpoint -> a Hugging Face directory for transformers and vLLM, a Megatron-Core checkpoint, or PEFT adapters."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from fivefold.backends import BACKENDS
from fivefold.checkpoint.card import CARD, Trained, model_card
from fivefold.checkpoint.checkpoints import Checkpoints, RunState
from fivefold.checkpoint.fingerprint import content_of
from fivefold.checkpoint.manifest import find_corruption
from fivefold.config import RunConfig
from fivefold.config.learners import FrozenConfig
from fivefold.config.roles import LEARNERS, Role
from fivefold.distributed.ranks import Ranks
from fivefold.errors import UserError
from fivefold.files import write_text, writing
from fivefold.hub import model_snapshot
from fivefold.layout import ParallelLayout
from fivefold.megatron import mesh
from fivefold.megatron.bridge import SafetensorsSource, Source, TorchDistSource
from fivefold.megatron.bridge.torch_dist import write_torch_dist
from fivefold.models.adapters import CONFIG, TENSORS, peft_config
from fivefold.models.config_json import read_config
from fivefold.models.families import mtp_copies
from fivefold.models.headers import INDEX, SINGLE
from fivefold.models.overrides import overridden
from fivefold.models.parameters import EMBEDDING, OUTPUT, ROUTER_BIAS
from fivefold.models.spec import ModelSpec
from fivefold.models.tensor_files import find_mtp_tensors
from fivefold.models.torch_dist import find_torch_dist

Form = Literal["huggingface", "megatron", "adapter"]
ROUTER_BIAS_NAME = ROUTER_BIAS.hf[0].rpartition(".")[2]
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model")


def checkpoint_of(path: Path, log: Callable[[str], None]) -> Path:
    """Return the checkpoint at `path`, or the latest one of the run there, after a line about it."""
    if not (path / "checkpoints").is_dir():
        return path
    latest = Checkpoints(path, 1).latest(log)
    if latest is None:
        raise UserError(f"{path} is a run without a checkpoint: it writes the first after trainer.save_every steps")
    log(f"{latest} is the latest checkpoint of {path}")
    return latest


def export(
    checkpoint: Path,
    out: Path,
    shard_gb: float = 5.0,
    part: str = "policy",
    form: Form = "huggingface",
    dtype: str | None = None,
    repository: str | None = None,
) -> str:
    """Write one model of a checkpoint to the new directory `out`, in one process; return a sentence that describes it.

    Of a run's directory, the latest checkpoint is taken. Adapters are merged into the model that the run began with; in the
    form `adapter` they are written separately, for PEFT. `dtype` is that of the weights, as config.json says if left out.
    For a `repository` of the hub, a model card is written too.

    Example: `export(Path("runs/first"), Path("models/first"))`.
    """
    checkpoint = checkpoint_of(checkpoint, print)
    if faults := find_corruption(checkpoint):
        raise UserError(f"checkpoint {checkpoint} cannot be used: {faults}")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty: choose a new directory")
    if not (checkpoint / part).is_dir():
        raise UserError(f"checkpoint {checkpoint} has no {part}: it has {', '.join(_parts(checkpoint))}")
    config = RunConfig.restore(checkpoint / "run.yaml")
    role = config.roles[part]
    path, settings = config.model.described_by(role.path), role.settings
    copied = (*_COPIED, "*.py") if config.model.trust_remote_code else _COPIED
    lora = settings.lora.spec
    if form == "adapter" and lora is None:
        raise UserError(f"checkpoint {checkpoint} has no adapters of its {part}: {part}.lora.rank is 0")
    if form == "adapter" and role.has_value_head:
        raise UserError(f"--to adapter is not for the {part}: its adapters say nothing without its value head; leave it out")
    state = RunState.read(checkpoint)
    directory = Path(path)
    if not directory.is_dir():
        # A checkpoint of adapters has no base weights.
        files = copied if lora is None else (*copied, "*.safetensors")
        directory = model_snapshot(path, (*files, *([CARD] if repository else [])), state.commits.get(path))
        if config.model.overrides and role.path == config.model.path:
            directory = overridden(directory, config.model.overrides)
    base = None if lora is None else _base_weights(role, directory, state)
    device = torch.device("cpu")
    with _alone(device):
        # One process holds the whole model, so the pipeline split does not apply.
        alone = ParallelLayout(settings.layout.backend)
        settings = replace(settings, backend=str(alone), megatron=replace(settings.megatron, pipeline={}))
        backend, dtype = BACKENDS[alone.backend], dtype or dtype_of(directory) or settings.dtype
        one_rank = backend.mesh(Ranks(alone, timeout_minutes=10), device, 1, seed=0, timeout_minutes=10)
        model = backend.model(
            directory=directory,
            policy=settings,
            mesh=one_rank,
            read_weights=False,
            value_head=role.has_value_head,
            torch_dist=base,
            stored_in=dtype,
            trust_remote_code=config.model.trust_remote_code,
        )
        model.load(checkpoint / part)
        if form == "megatron" and model.spec.stored:
            raise UserError(f"--to megatron needs a family that has a file here: got {model.spec.family}")
        source = (
            None
            if role.has_value_head
            else _mtp_source(path, directory, model.spec, state, find_torch_dist(config.model.path))
        )
        out.mkdir(parents=True, exist_ok=True)
        has_mtp = source is not None and bool(source.mtp_names)
        weights = model.weights()
        if source is not None:
            weights = with_mtp(weights, source, model.spec, dict(model.mtp_weights()) if model.has_mtp else {})
        weights = in_dtype(weights, dtype)
        if form == "adapter":
            assert lora is not None
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in in_dtype(model.adapters(), dtype)}
            with writing(out / TENSORS):
                save_file(tensors, out / TENSORS, metadata={"format": "pt"})
            write_text(out / CONFIG, json.dumps(peft_config(model.spec, lora, path), indent=2))
            total, description = sum(tensor.nbytes for tensor in tensors.values()), f"as adapters of {path}"
        elif form == "megatron":
            total = write_torch_dist(weights, model.spec, out)
            description = "as a torch_dist checkpoint of Megatron-Core"
        else:
            count, total = write_safetensors(weights, out, int(shard_gb * 2**30))
            description = f"in {count} file{'s' if count > 1 else ''}"
    for pattern in copied if form != "adapter" else ():
        for file in directory.glob(pattern):
            if file.name != "model.safetensors.index.json":
                shutil.copy(file, out / file.name)
    if form != "adapter":
        _name_dtype(out / "config.json", dtype)
    if role.has_value_head:
        _make_classifier(out / "config.json")
    if model.spec.mtp_layers and form != "adapter":
        if has_mtp:
            description += (
                f", layers of multi-token prediction as {'they were trained' if model.has_mtp else 'the model had them'}"
            )
        else:
            _without_mtp(out / "config.json")
    if repository is not None:
        # The checkpoint of a run is in RUN/checkpoints/step-000030.
        library, run_dir = "peft" if form == "adapter" else "transformers", checkpoint.absolute().parents[1]
        sections = (config.algorithm, config.data, config.policy, config.reward)
        drawn, seed = config.engine.sampling, config.trainer.seed
        run = Trained(part, path, directory / CARD, library, run_dir, *sections, drawn.temperature, seed)
        write_text(out / CARD, model_card(repository, run, state))
    trained = "" if dtype == settings.dtype else f" (trained in {settings.dtype})"
    return f"{out}: {total / 2**20:,.1f} MiB of weights {description}, {dtype}{trained}"


@contextmanager
def _alone(device: torch.device) -> Iterator[None]:
    """Within this block, this process is the only rank of a run."""
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    before = {name: os.environ[name] for name in alone if name in os.environ}
    os.environ.update(alone)
    try:
        mesh.init_process_group(device, timeout_minutes=10)
        yield
    finally:
        mesh.destroy()
        for name in alone:
            del os.environ[name]
        os.environ.update(before)


def _base_weights(role: Role, directory: Path, state: RunState) -> Path | None:
    """Return the Megatron-Core checkpoint with the adapters' base weights; None if `directory` has them.

    Raises ValueError if the base weights changed since training.
    """
    has_own = isinstance(role.section, FrozenConfig) and role.section.path
    key, path = role.path_key if has_own else "model.path", role.path
    then = state.fingerprint[key]["content"]
    now = content_of([Path(path) if Path(path).is_dir() else directory])
    if None not in (*then, *now) and then != now:
        raise UserError(f"{key}: {path} holds other files than those with which the adapters were trained: put them back")
    return find_torch_dist(path)


def _mtp_source(path: str, directory: Path, spec: ModelSpec, state: RunState, torch_dist: Path | None) -> Source | None:
    """Return the source of the multi-token prediction layers that a run began with; None if the model has none."""
    if not spec.mtp_layers:
        return None
    if torch_dist is not None:
        return TorchDistSource(torch_dist, spec)
    if not Path(path).is_dir():
        # From a hub, download only the files with these layers; without an index there is a single file.
        files = find_mtp_tensors(directory, spec).values() if (directory / INDEX).is_file() else [SINGLE]
        directory = model_snapshot(path, (*_COPIED, *sorted(set(files))), state.commits.get(path))
    return SafetensorsSource(directory, spec, find_mtp_tensors(directory, spec))


def with_mtp(
    weights: Iterable[tuple[str, Tensor]], source: Source, spec: ModelSpec, trained: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield `weights` and the multi-token prediction layers of `source`.

    Tensors that these layers share with the model come from `weights`, trained ones from `trained`, the others from
    `source`.
    """
    wanted, copies = source.mtp_names, mtp_copies(spec)
    shared = {name: copies[name] for name in wanted if name in copies}
    if spec.tied:
        shared = {name: EMBEDDING.hf[0] if original in OUTPUT.hf else original for name, original in shared.items()}
    for name, tensor in weights:
        yield name, tensor
        for copy in (copy for copy, original in shared.items() if original == name):
            yield copy, tensor
    for name in wanted:
        if name not in shared:
            yield name, trained[name] if name in trained else source[name][:]


def _without_mtp(path: Path) -> None:
    """Set the number of multi-token prediction layers in config.json to 0."""
    config = json.loads(path.read_text()) | {"num_nextn_predict_layers": 0}
    write_text(path, json.dumps(config, indent=2))


def dtype_of(directory: Path) -> str | None:
    """Return the type of a model's weights by its config.json; None if that does not name one."""
    config = read_config(directory)
    dtype = config.get("dtype") or config.get("torch_dtype")
    return dtype.removeprefix("torch.") if isinstance(dtype, str) else None


def in_dtype(weights: Iterable[tuple[str, Tensor]], dtype: str) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) pairs with the tensors in a type. A router's bias stays in float32, as its family has it."""
    for name, tensor in weights:
        yield name, tensor if name.endswith(ROUTER_BIAS_NAME) else tensor.to(getattr(torch, dtype))


def _name_dtype(path: Path, dtype: str) -> None:
    """Set the type of the weights in config.json, under the key that it has."""
    config = json.loads(path.read_text())
    keys = [key for key in ("dtype", "torch_dtype") if config.get(key) is not None] or ["dtype"]
    if any(str(config.get(key)).removeprefix("torch.") != dtype for key in keys):
        write_text(path, json.dumps(config | dict.fromkeys(keys, dtype), indent=2))


def _parts(checkpoint: Path) -> list[str]:
    return [name for name in LEARNERS if (checkpoint / name).is_dir()]


def _make_classifier(path: Path) -> None:
    """Describe a model with a value head in config.json as transformers does: a sequence classifier with one label."""
    config = json.loads(path.read_text())
    family = config["architectures"][0].partition("For")[0]
    config |= {"architectures": [f"{family}ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    config |= {"label2id": {"LABEL_0": 0}, "tie_word_embeddings": False}
    write_text(path, json.dumps(config, indent=2))


def write_safetensors(weights: Iterable[tuple[str, Tensor]], out: Path, limit: int) -> tuple[int, int]:
    """Write (name, tensor) pairs into files of at most `limit` bytes, with an index if there are several.

    Returns the number of files and the total bytes.
    """
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
    write_text(out / "model.safetensors.index.json", json.dumps(index, indent=1))
    return len(shards), total


def _shard(number: int) -> str:
    return f".shard-{number}.safetensors"


def _write_shard(tensors: dict[str, Tensor], out: Path, number: int) -> None:
    with writing(out / _shard(number)):
        save_file(tensors, out / _shard(number), metadata={"format": "pt"})
