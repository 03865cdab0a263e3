"""A chunk of the model under the names that mbridge and Megatron-Bridge expect: those of Transformer Engine's layers.

Chunk -> a tree of modules that share its parameters. Layers and experts are numbered within the chunk.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule

from fivefold.layout import ParallelLayout
from fivefold.megatron.chunks import named_weights
from fivefold.megatron.layers.layer_spec import PolicyModel
from fivefold.models.fused_names import fused_name
from fivefold.models.spec import ModelSpec

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.fc([12])")


def named_view(chunk: PolicyModel, spec: ModelSpec, layout: ParallelLayout) -> MegatronModule:
    """Return the tree for a chunk; it is valid until something moves the parameters."""
    # Megatron-Bridge sends the configuration to other stages, where training's objects would be refused.
    config = copy(chunk.config)
    config.finalize_model_grads_func = None
    root = _Part(config)
    root.share_embeddings_and_output_weights = spec.tied
    for number, layer in enumerate(chunk.layers_of_model):
        # mbridge counts layers in the order in which they were made.
        root.part(["decoder", "layers", str(number)]).layer_number = layer + 1
    for name, tensor in named_weights([chunk]).items():
        # Experts are views, and biases of routers are buffers.
        parameter: Any = (
            tensor if isinstance(tensor, torch.nn.Parameter) else torch.nn.Parameter(tensor, requires_grad=False)
        )
        if inside := _LAYER.fullmatch(name):
            layer, rest = int(inside[1]), fused_name(inside[2], spec, int(inside[1]))
            if expert := _EXPERT.fullmatch(rest):
                assert spec.moe is not None
                rest = f"mlp.experts.linear_fc{expert[2]}.weight{int(expert[1]) % (spec.moe.num_experts // layout.ep)}"
                vars(parameter).update(tensor_model_parallel=layout.etp > 1, partition_dim=int(expert[2]) - 1)
            name = f"decoder.layers.{chunk.layers_of_model.index(layer)}.{rest}"
        *path, last = name.split(".")
        root.part(path).hold(last, parameter)
    return root


class _Part(MegatronModule):
    """A module with parameters of another one. Both bridges read how it is sharded from its attributes."""

    tensor_model_parallel = False
    partition_dim = -1

    def __iter__(self) -> Iterator[torch.nn.Module]:
        yield from self.children()

    def part(self, path: Sequence[str]) -> Any:
        """Return the module at the end of a path, which is created if it does not exist."""
        if not path:
            return self
        if path[0] not in self._modules:
            self.add_module(path[0], _Part(self.config))
        return self.get_submodule(path[0]).part(path[1:])

    def hold(self, name: str, parameter: Any) -> None:
        """Register a parameter, and how it is sharded."""
        self.register_parameter(name, parameter)
        if getattr(parameter, "tensor_model_parallel", False):
            self.tensor_model_parallel, self.partition_dim = True, parameter.partition_dim
        elif name == "layer_norm_weight":
            self.__class__ = TELayerNormColumnParallelLinear


class TELayerNormColumnParallelLinear(_Part):
    """A linear layer with the norm before it; Megatron-Bridge tells by this name that the norm is not sharded."""
