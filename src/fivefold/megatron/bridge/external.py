"""mbridge and Megatron-Bridge, if installed, for loading and streaming weights.

Only their tables of weights and their converters are used; the model and its configuration (RoPE, norms, vocabulary padding)
stay ours. Both see the model as `named_view` shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.config.packages import BRIDGES, STAND_INS
from fivefold.distributed.objects import take_records_of
from fivefold.errors import UserError, first_line
from fivefold.layout import ParallelLayout
from fivefold.megatron.bridge.hf_weights import SafetensorsSource
from fivefold.megatron.bridge.named_view import named_view
from fivefold.megatron.chunks import named_weights
from fivefold.megatron.layers.layer_spec import PolicyModel
from fivefold.models.parameters import EMBEDDING, OUTPUT
from fivefold.models.spec import VOCABULARY_MULTIPLE, ModelSpec
from fivefold.stand_ins import stand_ins
from fivefold.tensors import check_finite


class Bridge(Protocol):
    """A library that converts weights between Hugging Face files and models, given as a list of their chunks."""

    def load(self, views: list[Any]) -> None: ...

    def weights(self, views: list[Any]) -> Iterator[tuple[str, Tensor]]: ...


class ExternalBridge:
    """Loads and streams the weights of one model through another project's library."""

    def __init__(
        self, kind: str, chunks: list[PolicyModel], directory: Path, spec: ModelSpec, layout: ParallelLayout
    ) -> None:
        """Open the bridge of `megatron.bridge_type`; raises UserError if it is not installed or lacks this kind of model."""
        self._kind, self._chunks, self._spec, self._layout = kind, chunks, spec, layout
        self._bridge = _OPENERS[kind](import_bridge(kind), directory, chunks[0].config, spec)

    @torch.no_grad()
    def load(self) -> None:
        """Set all parameters from the model's files. Collective."""
        weights = named_weights(self._chunks)
        for tensor in weights.values():
            tensor.fill_(torch.nan)
        self._bridge.load(self._views())
        for name, tensor in weights.items():
            # A bridge only warns about a parameter that its table lacks.
            check_finite(name, tensor, f"what {self._kind} read of the model's files")

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) on every rank. Collective."""
        for name, tensor in self._bridge.weights(self._views()):
            yield name, tensor.detach()

    def _views(self) -> list[Any]:
        return [named_view(chunk, self._spec, self._layout) for chunk in self._chunks]


def import_bridge(kind: str) -> Any:
    """Return the library of `megatron.bridge_type`; raises UserError if it cannot be imported."""
    [package] = BRIDGES[kind]
    try:
        with stand_ins(*STAND_INS.get(package, ())):
            return import_module(package)
    except Exception as error:
        raise UserError(
            f"megatron.bridge_type: {kind} needs the package {package}, whose import fails ({first_line(error)}): "
            "docs/bridges.md has the line that installs it; or use native, if the family has a file here"
        ) from error


class _MBridge:
    def __init__(self, library: Any, directory: Path, config: Any, spec: ModelSpec) -> None:
        self._directory = str(directory)
        with as_unsupported("mbridge", spec):
            # mbridge rounds every weight to its own dtype, bfloat16 by default.
            self._bridge = library.AutoBridge.from_pretrained(
                self._directory, dtype=config.params_dtype, make_vocab_size_divisible_by=VOCABULARY_MULTIPLE
            )
        self._bridge.vocab_size, self._bridge.padded_vocab_size = spec.vocab, spec.padded_vocab
        # mbridge records a tied output layer in a table of its class, where it would affect the next model.
        kind = type(self._bridge)
        self._bridge._DIRECT_MAPPING = dict(kind._DIRECT_MAPPING)
        if spec.tied:
            kind._DIRECT_MAPPING["output_layer.weight"] = OUTPUT.hf[0]

    def load(self, views: list[Any]) -> None:
        self._bridge.load_weights(views, self._directory)

    def weights(self, views: list[Any]) -> Iterator[tuple[str, Tensor]]:
        yield from self._bridge.export_weights(views)


class _MegatronBridge:
    def __init__(self, library: Any, directory: Path, config: Any, spec: ModelSpec) -> None:
        # It sends the model's configuration to the other stages of a pipeline.
        take_records_of("megatron")
        self._vocab, self._mapping = spec.vocab, library.models.conversion.param_mapping.MegatronParamMapping
        with as_unsupported("megatron-bridge", spec):
            opened = open_megatron_bridge(library, directory)
            self._bridge = opened._model_bridge
        # Its progress bars would go between the lines of the log.
        self._bridge._with_progress_tracking = lambda tasks, *_, **__: tasks
        files = _PaddedFiles(directory, spec)
        if spec.stored:
            _check_names(self._bridge.mapping_registry(), files.keys(), spec)
        self._files = SimpleNamespace(state=files, config=opened.hf_pretrained.config, model_name_or_path=str(directory))

    def load(self, views: list[Any]) -> None:
        with patch.object(self._mapping, "scatter_to_tp_ranks", _contiguous(self._mapping.scatter_to_tp_ranks)):
            self._bridge.load_weights_hf_to_megatron(self._files, views)

    def weights(self, views: list[Any]) -> Iterator[tuple[str, Tensor]]:
        stream = self._bridge.stream_weights_megatron_to_hf(views, self._files, cpu=False, merge_adapter_weights=False)
        for name, tensor in stream:
            yield name, tensor[: self._vocab] if name in _OF_VOCABULARY else tensor


def open_megatron_bridge(library: Any, directory: Path) -> Any:
    """Return Megatron-Bridge's view of a directory, of which it reads the configuration."""
    return library.AutoBridge.from_hf_pretrained(str(directory), trust_remote_code=False)


def _check_names(table: Any, names: list[str], spec: ModelSpec) -> None:
    """Raise UserError if a tensor of the files is not in Megatron-Bridge's table: it would be ignored."""
    if ignored := [name for name in names if table.hf_to_megatron_lookup(name) is None]:
        raise UserError(
            f"megatron.bridge_type: megatron-bridge has no place for {len(ignored)} tensors of this {spec.family} model, "
            f"the first: {ignored[:3]}: write an fsdp: layout"
        )


def _contiguous(scatter: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap Megatron-Bridge's scatter, which passes slices of columns to Gloo, and Gloo reads memory as it lies."""

    def contiguous(mapping: Any, splits: list[Tensor] | None, *rest: Any) -> Tensor:
        return scatter(mapping, splits and [part.contiguous() for part in splits], *rest)

    return contiguous


_OPENERS: dict[str, Callable[[Any, Path, Any, ModelSpec], Bridge]] = {
    "mbridge": _MBridge,
    "megatron-bridge": _MegatronBridge,
}
_OF_VOCABULARY = (*EMBEDDING.hf, *OUTPUT.hf)


@contextmanager
def as_unsupported(kind: str, spec: ModelSpec) -> Iterator[None]:
    """Turn an error of a library in this block into a UserError: it does not convert the model."""
    try:
        yield
    except Exception as error:
        instead = "write an fsdp: layout" if spec.stored else "use native"
        message = f"{kind} cannot convert a {spec.family} model ({first_line(error)}): {instead}"
        raise UserError(f"megatron.bridge_type: {message}") from error


class _PaddedFiles:
    """The tensors of a Hugging Face directory, with rows of zeros up to the padded vocabulary."""

    def __init__(self, directory: Path, spec: ModelSpec) -> None:
        self._files, self._spec = SafetensorsSource(directory, spec), spec
        self.source = self

    def keys(self) -> list[str]:
        """Return the names; a tied model may have a copy of the embedding in its files, which is not read."""
        return [name for name in self._files.names if not (self._spec.tied and name in OUTPUT.hf)]

    get_all_keys = keys

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._files[name][:]
        if name in _OF_VOCABULARY:
            return F.pad(tensor, (0, 0, 0, self._spec.padded_vocab - len(tensor)))
        return tensor
