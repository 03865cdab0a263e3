"""Runs inside SGLang's schedulers: receives new weights in any number of pieces, and compares what the scheduler then holds.

SGLang calls `receive` by its path (`--custom-weight-loader`) with the tensors of `/update_weights_from_tensor`. There is
exactly one tensor. Its name is a message, which contains the method to call and where the answer goes.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.linear import QKVParallelLinear
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]

from fivefold.engines.servers.buckets import BucketReader, Entry
from fivefold.engines.servers.server import Where
from fivefold.engines.servers.transfer import join_groups, leave, open_store
from fivefold.engines.weight_comparison import SentWeights

_ANSWER_SECONDS = 60.0
_FUSED = {"fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa")}


def receive(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Execute the message. An error is returned as an answer: if raised, it would end the server."""
    ((message, _),) = named_tensors
    call = json.loads(message)
    try:
        answer = {"result": getattr(_receiver_of(model), call["method"])(*call["arguments"])}
    except Exception:
        answer = {"error": traceback.format_exc()}
    store = _store(*call["answers_to"])
    store.set(f"{call['number']}/{get_tp_group().rank_in_group}", json.dumps(answer))


@cache
def _receiver_of(model: nn.Module) -> WeightReceiver:
    return WeightReceiver(model)


@cache
def _store(host: str, port: int) -> Store:
    return open_store(host, port, _ANSWER_SECONDS)


class WeightReceiver:
    """Receives the weights of one model: `begin_weights`, `receive_bucket` any number of times, `finish_weights`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._groups: Sequence[Any] = ()
        self._sent: SentWeights | None = None

    def join_groups(self, where: Where, names: Sequence[str], first: int, size: int) -> None:
        """Join the groups over which weights arrive, one for each sender; `first`: this server's first member."""
        leave(list(self._groups))
        rank = first + get_tp_group().rank_in_group
        self._groups = join_groups(open_store(*where), names, rank, size, self._device)

    def begin_weights(self, verify: bool) -> None:
        """Begin an update. `verify`: sum up the received weights, which `finish_weights` compares with the held ones."""
        self._reader = BucketReader(self._device, self._groups)
        copies = {
            f"{name}.{kind}": module.num_kv_head_replicas
            for name, module in self._model.named_modules()
            if isinstance(module, QKVParallelLinear)
            for kind in ("weight", "bias")
        }
        dtypes = {name: tensor.dtype for name, tensor in self._model.named_parameters()}
        fused = _FUSED | getattr(self._model, "packed_modules_mapping", {})
        self._sent = SentWeights(dtypes, fused, copies) if verify else None

    def receive_bucket(self, handles: Sequence[dict[str, Any]], entries: Sequence[Entry], used: int) -> None:
        """Load tensors from memory of another process; `handles[i]` is that of tensor-parallel rank i."""
        handle = handles[get_tp_group().rank_in_group % len(handles)]
        self._model.load_weights(self._noted(self._reader.take(handle, entries, used)))
        if self._device.type == "cuda":
            # The sender overwrites the memory after this call returns.
            torch.cuda.current_stream().synchronize()

    def _noted(self, pairs: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in pairs:
            if self._sent is not None:
                self._sent.add(name, tensor)
            yield name, tensor

    def finish_weights(self, is_whole: bool) -> list[str]:
        """End an update; returns what is wrong with the received weights. `is_whole`: all of them were received."""
        self._reader.close()
        if not is_whole or self._sent is None:
            return []
        held = dict(_held_weights(self._model))
        if missing := self._sent.missing(held):
            # SGLang does not report parameters that received no tensor, nor names that it does not have.
            return [f"{len(missing)} of {len(held)} parameters got no new weights, the first: {missing[:3]}"]
        return self._sent.faults(held.items(), get_tp_group().cpu_group)


def _held_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter, without padding of the vocabulary."""
    for prefix, module in model.named_modules():
        for name, tensor in module.named_parameters(prefix, recurse=False):
            is_padded = isinstance(module, VocabParallelEmbedding)
            yield name, tensor[: module.shard_indices.num_org_elements] if is_padded else tensor
