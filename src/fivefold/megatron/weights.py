"""The weights of this rank's chunks and their adapters: loaded from files, streamed as full tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.config.learners import PolicyConfig
from fivefold.distributed.objects import broadcast_json
from fivefold.distributed.ranks import Ranks
from fivefold.errors import UserError, first_line, sentence_of
from fivefold.megatron.bridge import SafetensorsSource, TorchDistSource, WeightStream, load_adapters, load_parameters
from fivefold.megatron.bridge.external import ExternalBridge
from fivefold.megatron.chunks import MergedWeights, adapter_weights, add_adapters, named_weights
from fivefold.megatron.layers.adapters import LostToRounding
from fivefold.megatron.layers.layer_spec import PolicyModel
from fivefold.megatron.mesh import Mesh
from fivefold.models.adapters import adapter_tensors, check_adapter_files
from fivefold.models.families import mtp_parameters_of
from fivefold.models.parameters import MappedParameter
from fivefold.models.spec import ModelSpec
from fivefold.models.tensor_files import check_tensor_files
from fivefold.models.torch_dist import check_torch_dist


class ModelWeights:
    """The weights of one model on this rank, with the adapters that `policy.lora` adds to it."""

    def __init__(
        self,
        chunks: list[PolicyModel],
        spec: ModelSpec,
        mesh: Mesh,
        policy: PolicyConfig,
        directory: Path,
        *,
        bucket_mb: int,
        read_weights: bool,
        torch_dist: Path | None,
        adapters: Path | None,
        stored_in: str | None,
        seed: int,
    ) -> None:
        """Load the weights and add the adapters; the arguments are those of `MegatronModel`. Collective."""
        self._chunks, self._spec, self._mesh, self._bucket_mb = chunks, spec, mesh, bucket_mb
        self._lora = lora = policy.lora.spec
        loads = read_weights or lora is not None
        kind = policy.megatron.bridge_type
        if spec.value_head and kind != "native":
            raise UserError(f"bridge_type must be native for a critic or a reward model: got {kind}")
        if kind != "native" and torch_dist is not None:
            raise UserError(f"bridge_type must be native for a checkpoint of Megatron-Core: got {kind}")
        if kind != "native" and lora is not None:
            raise UserError(f"bridge_type must be native for adapters (policy.lora): got {kind}")
        if loads:
            check = partial(check_tensor_files, directory) if torch_dist is None else partial(check_torch_dist, torch_dist)
            _check_files(partial(check, has_mtp=policy.mtp.train), spec, mesh.ranks)
        external = None if kind == "native" else ExternalBridge(kind, chunks, directory, spec, mesh.layout)
        self.value_head_is_new = False
        """The value head was initialized to 0, because the directory has none."""
        if loads and external is not None:
            external.load()
        elif loads:
            source = SafetensorsSource(directory, spec) if torch_dist is None else TorchDistSource(torch_dist, spec)
            self.value_head_is_new = spec.value_head and not source.has_value_head
            load_parameters(named_weights(chunks), source, spec, mesh.ranks.coords, mesh.layout)
        if lora is not None:
            add_adapters(chunks, spec, lora, mesh)
            if read_weights:
                if adapters is not None:
                    _check_files(lambda spec: check_adapter_files(adapters, spec, lora), spec, mesh.ranks)
                place = (mesh.ranks.coords, mesh.layout)
                load_adapters(adapter_weights(chunks), adapters, policy.lora.init, seed, spec, lora, *place)
        self._lost: LostToRounding | None = None
        weights = named_weights
        if lora is not None:
            self._lost = LostToRounding(getattr(torch, stored_in or policy.dtype), mesh.device)
            weights = partial(MergedWeights, place=mesh.ranks.coords, lost=self._lost)
        self._merged = self._stream_of(lambda: weights(chunks)) if external is None else external.weights

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) on every rank, adapters merged; collective."""
        if self._lost is not None:
            self._lost.sums_2.zero_()
        return self._merged()

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (PEFT name, full A or B) of the adapters on every rank; collective."""
        assert self._lora is not None, "a model built without policy.lora has no adapters"
        return self._stream_of(lambda: adapter_weights(self._chunks), adapter_tensors(self._spec, self._lora))()

    def mtp(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) of the layers of multi-token prediction on every rank; collective."""
        return self._stream_of(lambda: named_weights(self._chunks), mtp_parameters_of(self._spec))()

    def lost_to_rounding(self) -> float | None:
        """Return the share of what adapters add that the engine's weights lack; None if they add nothing. Collective."""
        assert self._lost is not None, "a model built without policy.lora has no adapters"
        sums_2 = self._lost.sums_2.cpu()
        dist.all_reduce(sums_2, group=self._mesh.ranks.members)
        lost, share = sums_2.tolist()
        return lost / share if share else None

    def _stream_of(
        self, named: Callable[[], dict[str, Tensor]], parameters: Iterable[MappedParameter] | None = None
    ) -> WeightStream:
        return WeightStream(named, self._spec, self._mesh, self._bucket_mb, parameters)


def _check_files(check: Callable[[ModelSpec], None], spec: ModelSpec, ranks: Ranks) -> None:
    """Raise ValueError on all ranks of the model if the first one finds the tensor files unusable. Collective."""
    fault: str | None = None
    if ranks.leads:
        try:
            check(spec)
        except (ValueError, OSError) as error:
            fault = sentence_of(error) or first_line(error)
    if fault := broadcast_json(fault, ranks.first, ranks.members):
        raise UserError(fault)
