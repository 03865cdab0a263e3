"""Megatron-Core's `torch_dist` checkpoints: reads tensors by their Hugging Face names, and writes a model in the format."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import Tensor

from fivefold.backend.sharded_files import Box
from fivefold.errors import UserError, first_line
from fivefold.megatron.bridge.sharding import SHARDERS, Sliceable
from fivefold.models.families import mtp_parameters_of, parameters_of
from fivefold.models.parameters import EMBEDDING, OUTPUT, MappedParameter, Sharding
from fivefold.models.spec import ModelSpec
from fivefold.models.torch_dist import LATEST, Chunk, Stored, TorchDistNames, has_value_head, stored_name

_KEPT_CHUNKS = 4
"""Number of chunks kept in memory: one may hold all experts of a layer, which are requested one after another."""


class TorchDistSource:
    """Tensors of a checkpoint by their names in Hugging Face files; reads one parameter at a time."""

    def __init__(self, directory: Path, spec: ModelSpec) -> None:
        self._directory, self._spec = directory, spec
        self._names = TorchDistNames.read(directory)
        self._items = {name: item for item in parameters_of(spec) + mtp_parameters_of(spec) for name in item.hf}
        self._read = lru_cache(_KEPT_CHUNKS)(self._read_chunk)
        self._whole = lru_cache(1)(self._merge)
        if spec.tied and self._names.has_output:
            self._check_tied()

    @property
    def has_value_head(self) -> bool:
        """The last layer outputs one number per token instead of one per vocabulary entry."""
        return has_value_head(self._directory, self._spec)

    @property
    def mtp_names(self) -> list[str]:
        """Names of the tensors of multi-token prediction layers."""
        held = [item for item in mtp_parameters_of(self._spec) if self._names.find(item)]
        return [name for item in held for name in item.hf]

    def __getitem__(self, name: str) -> Sliceable:
        item = self._items[name]
        return self._whole(item)[item.hf.index(name)]

    def _check_tied(self) -> None:
        """Raise ValueError if the checkpoint's output layer differs from the embedding that it is tied to."""
        head, embedding = (Stored(self._names.tensors[row.mcore], ()) for row in (OUTPUT, EMBEDDING))
        one, other = (self._tensor(stored)[: self._spec.vocab] for stored in (head, embedding))
        if not torch.equal(one, other):
            raise UserError(
                f"{self._directory}: tie_word_embeddings in config.json is true, so {OUTPUT.mcore} must be left out or be "
                f"equal to {EMBEDDING.mcore}: it holds other numbers; set tie_word_embeddings to false"
            )

    def _merge(self, item: MappedParameter) -> list[Tensor]:
        """Return the Hugging Face tensors of a parameter."""
        parts = [self._tensor(part) for part in self._names.find(item)]
        assert parts, f"{item.mcore} was looked for before"
        if item.sharding is Sharding.VOCABULARY:
            return [parts[0][: self._spec.vocab]]
        return SHARDERS[item.sharding].merge([torch.cat(parts) if len(parts) > 1 else parts[0]], self._spec)

    def _tensor(self, stored: Stored) -> Tensor:
        """Assemble a part of a stored tensor from the chunks that overlap it."""
        axes = len(stored.index)
        wanted = Box((*stored.index, *(0 for _ in stored.shape)), (*(1 for _ in range(axes)), *stored.shape))
        values = torch.empty(wanted.size, dtype=getattr(torch, stored.tensor.dtype))
        filled = 0
        for chunk in stored.tensor.chunks:
            box = Box(chunk.offset, chunk.size)
            if (shared := wanted & box) is not None:
                values[shared.within(wanted)].copy_(self._read(chunk)[shared.within(box)])
                filled += torch.Size(shared.size).numel()
        if filled != values.numel():
            raise UserError(
                f"{self._directory} holds {filled} of the {values.numel()} numbers of {stored.tensor.name}: it is incomplete"
            )
        return values.view(stored.shape)

    def _read_chunk(self, chunk: Chunk) -> Tensor:
        path = self._directory / chunk.file
        with path.open("rb") as file:
            file.seek(chunk.begin)
            content = file.read(chunk.length)
        try:
            # Tensors only: nothing else that a pickle may request is executed.
            tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:
            raise UserError(f"{path} holds no tensor at {chunk.begin}: {first_line(error)}") from error
        if not isinstance(tensor, Tensor) or tensor.numel() != torch.Size(chunk.size).numel():
            raise UserError(f"{path} must hold a tensor of {chunk.size} at {chunk.begin}: it is damaged")
        return tensor.detach().view(chunk.size)


def write_torch_dist(weights: Iterable[tuple[str, Tensor]], spec: ModelSpec, out: Path) -> int:
    """Write (Hugging Face name, tensor) pairs of a whole model into the empty directory `out`; return the bytes written.

    The files are laid out like a release of Megatron-LM. Layers of multi-token prediction may be missing. Call this in one
    process of an initialized process group.
    """
    tensors = dict(weights)
    sharded: dict[str, ShardedTensor | ShardedObject] = {}
    size = 0
    ahead = [item for item in mtp_parameters_of(spec) if set(item.hf) <= set(tensors)]
    for item in parameters_of(spec) + ahead:
        parts = [tensors[name].detach().cpu() for name in item.hf]
        if item.sharding is Sharding.VOCABULARY:
            data = parts[0].new_zeros(spec.padded_vocab, *parts[0].shape[1:])
            data[: spec.vocab] = parts[0]
        else:
            data = SHARDERS[item.sharding].shard(parts, 0, 1, spec).clone()
        name, place, sizes = stored_name(item, spec)
        offsets = [(axis, index, sizes[axis]) for axis, index in enumerate(place)]
        sharded[item.mcore] = ShardedTensor.from_rank_offsets(name, data, *offsets, prepend_axis_num=len(place))
        for module in _with_extra_state(name):
            key = f"{module}._extra_state"
            sharded[f"{item.mcore}.{key}"] = ShardedObject(key, None, sizes or (1,), place or (0,), replica_id=0)
        size += data.nbytes
    release = out / "release"
    release.mkdir(parents=True)
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
    content = {"model": sharded, "checkpoint_version": 3.0, "iteration": 0}
    dist_checkpointing.save(content, str(release), strategy)
    (out / LATEST).write_text("release")
    return size


def _with_extra_state(name: str) -> Iterator[str]:
    """Yield the modules of a parameter that expect quantization state in a checkpoint; it is empty here."""
    module, _, kind = name.rpartition(".")
    if kind != "weight":
        return
    if module.rpartition(".")[2].startswith("linear_"):
        yield module
    if module.endswith("linear_proj"):
        yield module.removesuffix("linear_proj") + "core_attention"
    if module == "decoder.final_layernorm":
        # The output layer has such state even if its weight is the embedding's.
        yield "output_layer"
