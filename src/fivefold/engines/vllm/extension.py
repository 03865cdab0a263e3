"""Runs inside vLLM's workers: receives new weights in any number of pieces, and compares what the worker then holds.

vLLM loads this class by its path (`worker_extension_cls`) and mixes it into its worker; `collective_rpc` calls its methods.
vLLM's own `reload_weights` is silently wrong in three cases: weights that arrive in several calls, tied embeddings, and
mixtures of experts.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

from fivefold.distributed.processes import unname_shared_memory
from fivefold.engines.garbage import collect_seldom, freeze_heap
from fivefold.engines.servers.buckets import BucketReader, Entry
from fivefold.engines.servers.server import Where
from fivefold.engines.servers.transfer import join_groups, leave, open_store
from fivefold.engines.vllm.draws import keyed_sampler
from fivefold.engines.vllm.logprobs import LogprobCollector
from fivefold.engines.vllm.slots import take_slots_at_hand
from fivefold.engines.weight_comparison import SentWeights
from fivefold.errors import RunError

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
SIZES = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
"""Keys of the model's config.json that show whether a server holds another model."""


class WeightReceiver(LogprobCollector):
    """Mixed into vLLM's worker: `begin_weights`, `receive_weights` any number of times, `finish_weights`."""

    device: torch.device
    vllm_config: Any
    get_model: Any

    _run: str | None = None
    _is_receiving = False
    _groups: Sequence[Any] = ()
    _reader: BucketReader

    def prepare(self) -> bool:
        """Sample from now on with less work for the host, and collect the log-probs of tagged requests.

        Returns whether requests of drawn tokens need no log-probs of vLLM.
        """
        take_slots_at_hand()
        sampler = keyed_sampler(self.model_runner, self.vllm_config.model_config.seed or 0)
        self.collect_logprobs(sampler)
        return sampler is not None

    def describe(self) -> dict[str, Any]:
        """Returns what senders of weights and requests need to check about this engine."""
        model = self.vllm_config.model_config
        sizes = {name: getattr(model.hf_config, name) for name in SIZES if hasattr(model.hf_config, name)}
        return {"sizes": sizes, "max_model_len": model.max_model_len}

    def answer(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Returns the result of a method, or the error that it raises.

        If two workers raise, vLLM takes the second error for the answer to the next call.
        """
        try:
            return {"result": getattr(self, method)(*arguments)}
        except Exception as error:
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"}

    def join_groups(self, where: Where, names: Sequence[str], first: int, size: int, run: str) -> None:
        """Join the groups over which weights arrive, one for each sender; `first`: this server's first member."""
        self._check_run(run)
        if self.device.type == "cpu":
            unname_shared_memory(os.getpid())
        leave(list(self._groups))
        rank = first + get_tp_group().rank_in_group
        self._groups = join_groups(open_store(*where), names, rank, size, self.device)

    def receive_bucket(self, handles: Sequence[dict[str, Any]], entries: Sequence[Entry], used: int) -> None:
        """Load tensors from memory of another process; `handles[i]` is that of tensor-parallel rank i."""
        handle = handles[get_tp_group().rank_in_group % len(handles)]
        self.receive_weights(self._reader.take(handle, entries, used))
        if self.device.type == "cuda":
            # The sender overwrites the memory after this call returns.
            torch.cuda.current_stream().synchronize()

    def take(self, run: str) -> int:
        """Accept weights of this run alone from now on; returns the number of objects that the collector of garbage still
        looks at."""
        self._run = run
        collect_seldom()
        # vLLM itself does not in every process: 0.20 not in workers of several GPUs, 0.32 not in workers on CPUs.
        return freeze_heap()

    def _check_run(self, run: str | None) -> None:
        if run != self._run:
            raise RunError("another run has taken this server")

    def begin_weights(self, verify: bool, run: str | None = None) -> None:
        """Begin an update. `verify`: sum up the received weights, which `finish_weights` compares with the held ones."""
        self._check_run(run)
        if self._is_receiving:
            # The sender of the last update was killed: a new update cannot begin on half a model.
            self.finish_weights(False)
        self._is_receiving = True
        model = self.get_model()
        for module in model.modules() if self.device.type == "cpu" else ():
            # On a CPU an existing kernel keeps the weights of experts in its own order, and would not receive the new ones.
            if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                module.quant_method.moe_kernel = None
        held = {name: tensor.dtype for name, tensor in model.named_parameters() if not name.endswith(_DERIVED)}
        copies = {
            f"{name}.{kind}": module.num_kv_head_replicas
            for name, module in model.named_modules()
            if isinstance(module, QKVParallelLinear)
            for kind in ("weight", "bias")
        }
        self._is_tied = self.vllm_config.model_config.hf_config.tie_word_embeddings
        initialize_layerwise_reload(model)
        # The scales of quantized weights are computed from the received weights, and are never received.
        awaited = {name for name, _ in model.named_parameters()}
        self._names = {name: dtype for name, dtype in held.items() if name in awaited}
        self._loaded: set[str] = set()
        fused = getattr(model, "packed_modules_mapping", {})
        self._sent = SentWeights(self._names, fused, copies) if verify else None
        self._reader = BucketReader(self.device, self._groups)

    def receive_weights(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors by their names in Hugging Face files; they must not be written to afterwards."""
        self._loaded |= self.get_model().load_weights(self._noted(pairs)) or set()

    def _noted(self, pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in pairs:
            if self._sent is not None:
                self._sent.add(name, tensor)
            yield name, tensor
            if self._is_tied and name == EMBEDDING:
                # vLLM expects the output layer under its own name, even if it shares memory with the embedding.
                yield OUTPUT, tensor

    def finish_weights(self, is_whole: bool) -> list[str]:
        """End an update; returns what is wrong with the received weights. `is_whole`: all of them were received.

        Also required after an incomplete transfer: the next `begin_weights` must not find half a model. Parameters that were
        not received then have whatever is in memory.
        """
        self._is_receiving = False
        self._reader.close()
        model = self.get_model()
        finalize_layerwise_reload(model, self.vllm_config.model_config)
        for head in _packed_heads(model) if self.device.type == "cpu" and self._is_tied else ():
            # Some releases (0.28) keep, for a tied output layer, what its kernel made of the old weights.
            head.quant_method.process_weights_after_loading(head)
        if not is_whole:
            return []
        # Some releases return the names of experts from before these got a separate module.
        loaded = {name.replace(".routed_experts.", ".") for name in self._loaded}
        if missing := sorted(name for name in self._names if name.replace(".routed_experts.", ".") not in loaded):
            return [f"{len(missing)} of {len(self._names)} parameters got no new weights, the first: {missing[:3]}"]
        if self._sent is None:
            return []
        unused = [OUTPUT for head in _packed_heads(model) if not _computes_with_its_weight(head)]
        return self._sent.faults(held_weights(model), get_tp_group().cpu_group, unused)


_DERIVED = (".W_UK_T", ".W_UV")
"""Parameters that vLLM computes from others: parts of latent attention's projections."""


def _packed_heads(model: nn.Module) -> Iterator[Any]:
    """Yields output layers, where a kernel may keep a packed copy next to the weight that is read."""
    return (module for module in model.modules() if isinstance(module, ParallelLMHead))


def _computes_with_its_weight(head: Any) -> bool:
    """Returns whether an output layer on a CPU computes with its weight; on GPUs there is no other copy."""
    if head.weight.device.type != "cpu":
        return True
    unit = torch.eye(head.weight.shape[1], dtype=head.weight.dtype)
    return bool(torch.equal(head.quant_method.apply(head, unit, None).T, head.weight))


def held_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter, without padding of the vocabulary.

    If a linear layer keeps its weight only in a kernel's own form, the weight is recovered by applying the layer to the unit
    vectors.
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
