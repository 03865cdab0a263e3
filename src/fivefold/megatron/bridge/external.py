"""mbridge and Megatron-Bridge, if installed, for loading and streaming weights.

Both name parameters as Transformer Engine's fused layers do, so our model is presented to them under those names. Only their
weight tables are used; the model's configuration (RoPE, norms, vocabulary padding) stays ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fivefold.config.packages import BRIDGES, missing_packages
from fivefold.errors import UserError
from fivefold.megatron.chunks import FUSED_NAMES
from fivefold.models.parameters import OUTPUT
from fivefold.models.spec import VOCABULARY_MULTIPLE, ModelSpec


class ExternalBridge(Protocol):
    def load(self, directory: Path) -> None: ...

    def weights(self) -> Iterator[tuple[str, Tensor]]: ...


def external_bridge(kind: str, chunks: list[Any], directory: Path, spec: ModelSpec) -> ExternalBridge:
    """Return the bridge of `megatron.bridge_type`; raises ValueError naming the packages that are missing."""
    if spec.moe is not None or len(chunks) > 1:
        raise UserError(
            f"megatron.bridge_type: {kind} is supported for dense models without virtual stages: use native, which has all"
        )
    if missing := missing_packages(BRIDGES[kind]):
        raise UserError(
            f"megatron.bridge_type: {kind} needs the packages {'; '.join(missing)}: "
            "install them, or use native, which needs none"
        )
    view = _FusedNames(chunks[0])
    if kind == "mbridge":
        return _MBridge(view, directory, spec)
    return _MegatronBridge(view, directory)


class _FusedNames(torch.nn.Module):
    """View of a model whose parameters have Transformer Engine's names; the parameters are shared with that model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder, self.config = model.decoder, model.config
        self._shown = (model,)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_shown"][0], name)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, parameter in self._shown[0].named_parameters():
            for theirs, ours in FUSED_NAMES.items():
                if name.endswith(f".{ours}"):
                    name = name.removesuffix(ours) + theirs
            yield name, parameter

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return {name: parameter.detach() for name, parameter in self.named_parameters()}


class _MBridge:
    def __init__(self, view: _FusedNames, directory: Path, spec: ModelSpec) -> None:
        import mbridge

        self._view = view
        # mbridge rounds every weight to its own dtype, bfloat16 by default.
        self._bridge = mbridge.AutoBridge.from_pretrained(
            str(directory), dtype=view.config.params_dtype, make_vocab_size_divisible_by=VOCABULARY_MULTIPLE
        )
        self._bridge.vocab_size, self._bridge.padded_vocab_size = spec.vocab, spec.padded_vocab
        # mbridge records a tied output layer in a table of its class, where it would affect the next model.
        kind = type(self._bridge)
        self._bridge._DIRECT_MAPPING = dict(kind._DIRECT_MAPPING)
        if spec.tied:
            kind._DIRECT_MAPPING["output_layer.weight"] = OUTPUT.hf[0]

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        self._bridge.load_weights([self._view], str(directory))

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._bridge.export_weights([self._view])


class _MegatronBridge:
    def __init__(self, view: _FusedNames, directory: Path) -> None:
        from megatron.bridge import AutoBridge

        self._view = view
        self._bridge = AutoBridge.from_hf_pretrained(str(directory), trust_remote_code=False)

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        self._bridge.load_hf_weights([self._view], str(directory))

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._bridge.export_hf_weights([self._view], cpu=False, show_progress=False)
