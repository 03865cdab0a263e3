"""What runs inside vLLM's workers: new weights in any number of pieces, and what the worker holds afterwards.

vLLM names this class by its path (`worker_extension_cls`) and mixes it into its worker; methods are called by
`collective_rpc`. Its own `reload_weights` is silently wrong where weights come in several calls, where embeddings are tied
and for mixtures of experts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


class WeightReceiver:
    """Mixed into vLLM's worker: `begin_weights`, `receive_weights` any number of times, `finish_weights`."""

    device: torch.device
    vllm_config: Any
    get_model: Any

    def begin_weights(self, verify: bool) -> None:
        """`verify`: add up what comes, for `finish_weights` to compare with what is held."""
        model = self.get_model()
        for module in model.modules() if self.device.type == "cpu" else ():
            # On a CPU a kernel that exists keeps weights of experts in its own order, and would not be given the new ones.
            if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                module.quant_method.moe_kernel = None
        self._names = {name: tensor.dtype for name, tensor in model.named_parameters() if not name.endswith(_DERIVED)}
        self._key_value_copies = {
            f"{name}.{kind}": module.num_kv_head_replicas
            for name, module in model.named_modules()
            if isinstance(module, QKVParallelLinear)
            for kind in ("weight", "bias")
        }
        self._is_tied = self.vllm_config.model_config.hf_config.tie_word_embeddings
        self._loaded: set[str] = set()
        self._sent: dict[str, int] | None = {} if verify else None
        initialize_layerwise_reload(model)

    def receive_weights(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Take tensors by their names in Hugging Face files; they must not be written to afterwards."""
        self._loaded |= self.get_model().load_weights(self._noted(pairs)) or set()

    def _noted(self, pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        model = self.get_model()
        for name, tensor in pairs:
            if self._sent is not None:
                place = engine_name(name, self._names, getattr(model, "packed_modules_mapping", {}))
                copies = self._key_value_copies.get(place, 1) if ".q_proj." not in name else 1
                held_as = tensor.to(self._names.get(place, tensor.dtype))
                self._sent[place] = self._sent.get(place, 0) + copies * bit_sum(held_as)
            yield name, tensor
            if self._is_tied and name == EMBEDDING:
                # vLLM waits for the output layer by its own name, whoever it shares its memory with.
                yield OUTPUT, tensor

    def finish_weights(self, is_whole: bool) -> list[str]:
        """What is wrong with the weights that were received; `is_whole`: none of them failed to come.

        Without an end the next `begin_weights` would meet half a model: whatever did not come is what lies in memory.
        """
        model = self.get_model()
        finalize_layerwise_reload(model, self.vllm_config.model_config)
        if not is_whole:
            return []
        if missing := sorted(set(self._names) - self._loaded):
            return [f"{len(missing)} of {len(self._names)} parameters got no new weights, the first: {missing[:3]}"]
        return [] if self._sent is None else self._differences(model, self._sent)

    def _differences(self, model: nn.Module, sent: dict[str, int]) -> list[str]:
        own = {name: bit_sum(tensor) for name, tensor in held_weights(model) if name in sent}
        if unknown := sorted(set(sent) - set(own)):
            return [f"{len(unknown)} tensors have no parameter to be compared with, the first: {unknown[:3]}"]
        names = sorted(own)
        local = torch.tensor([own[name] for name in names])
        total = local.clone()
        dist.all_reduce(total, group=get_tp_group().cpu_group)
        # A parameter is either cut over the tensor-parallel ranks or a copy on each.
        wrong = [
            name
            for name, mine, everyone in zip(names, local.tolist(), total.tolist(), strict=True)
            if sent[name] % _WRAP not in (mine % _WRAP, everyone % _WRAP)
        ]
        return [f"{len(wrong)} of {len(names)} parameters are not what was sent, the first: {wrong[:3]}"] if wrong else []


_WRAP = 1 << 64
_DERIVED = (".W_UK_T", ".W_UV")
"""Parameters that vLLM makes of others: parts of latent attention's projections."""
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_EXPERT = re.compile(r"(?P<layer>.*\.)experts\.\d+\.(?P<part>\w+)\.weight")
_EXPERT_PARTS = {"gate_proj": "w13_weight", "up_proj": "w13_weight", "down_proj": "w2_weight"}
_EXPERT_PARTS |= {"w1": "w13_weight", "w3": "w13_weight", "w2": "w2_weight"}


def bit_sum(tensor: Tensor) -> int:
    """The sum of all bit patterns: the same in whatever order, and padded with zeros, a kernel keeps them."""
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    # Adding 0 makes one zero of two: what a product gives for -0 is 0.
    return int((tensor.detach() + 0).contiguous().view(kind).sum(dtype=torch.int64))


def engine_name(name: str, names: Collection[str], fused: Mapping[str, Sequence[str]]) -> str:
    """The parameter of the engine that holds a tensor of the files; the name itself where it is held alone."""
    if expert := _EXPERT.fullmatch(name):
        end = _EXPERT_PARTS.get(expert["part"], "")
        return next((held for held in names if held.startswith(expert["layer"]) and held.endswith(end)), name)
    for whole, parts in {**_FUSED, **fused}.items():
        for part in parts:
            held = name.replace(f".{part}.", f".{whole}.")
            if held != name and held in names:
                return held
    return name


def held_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter, without padding of the vocabulary.

    Of a linear map that keeps its weight in a kernel's own form it is what the map makes of the unit vectors.
    """
    for prefix, module in model.named_modules():
        for name, tensor in module.named_parameters(prefix, recurse=False):
            if tensor.numel() == 0 and isinstance(module, LinearBase):
                width = getattr(module, "input_size_per_partition", module.input_size)
                unit = torch.eye(width, dtype=tensor.dtype, device=tensor.device)
                yield name, module.quant_method.apply(module, unit, None)
            elif isinstance(module, VocabParallelEmbedding):
                yield name, tensor[: module.shard_indices.num_org_elements]
            else:
                yield name, tensor
