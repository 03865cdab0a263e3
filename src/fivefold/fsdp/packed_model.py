"""The door to transformers: a directory -> its model on the meta device, our attention and head in it, sharded."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from fivefold.backend.log_probs import log_probs
from fivefold.backend.micro_batches import MicroBatch
from fivefold.backend.self_check import logprobs_alone, parameters_on_meta
from fivefold.config.fsdp_checks import unproven_fault
from fivefold.config.learners import PolicyConfig
from fivefold.errors import UserError
from fivefold.fsdp import attention, experts, fused, linear_attention, rotary, tensor_parallel
from fivefold.fsdp.collectives import copy_to, own_rows
from fivefold.fsdp.mesh import Mesh, Split
from fivefold.models.families import runs_own_code

VALUE_HEAD = "score.weight"


class PackedModel(torch.nn.Module):
    """A language model of transformers over packed sequences: hidden states, then log-probs and entropies, or values."""

    def __init__(self, model: Any, value_head: bool, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        config = model.config.get_text_config()
        self.model, self._tp, self.dtype = model, mesh.tp, dtype
        self.family: str = config.model_type
        self.vocab: int = config.vocab_size
        cap = getattr(config, "final_logit_softcapping", None)
        self._cap = None if cap is None else float(cap)
        # Cohere multiplies logits, Granite divides them.
        self._scale = float(getattr(config, "logit_scale", None) or 1.0)
        self._scale /= float(getattr(config, "logits_scaling", None) or 1.0)
        self.layers = _decoder_layers(model)
        head = model.get_output_embeddings()
        if head is None or getattr(head, "bias", None) is not None:
            head_kind = "no output layer" if head is None else "an output layer with a bias"
            raise UserError(
                f"fsdp: {config.model_type} has {head_kind}, which is not built; use megatron: if it has the family"
            )
        # Packed sequences have no padding: a token that would pad elsewhere is real here, and its embedding learns.
        model.get_input_embeddings().padding_idx = None
        self.score: torch.nn.Linear | None = None
        if value_head:
            self.score = torch.nn.Linear(config.hidden_size, 1, bias=False, device="meta")
            model.set_output_embeddings(None)

    def forward(self, micro: MicroBatch | None, alone_T: Tensor | None = None) -> Tensor:
        """[2, S] log-probs and entropies (or values and zeros) of a micro-batch.

        With `alone_T`, the tokens of one sequence: [T] log-prob of each but the first (0), or values, without packing and
        as transformers computes them.
        """
        if micro is None:
            assert alone_T is not None
            return self._alone(alone_T)
        positions_T = micro.packing.positions_T
        assert positions_T is not None
        hidden = self.model.base_model(
            input_ids=micro.token_ids_T[None], position_ids=positions_T[None], use_cache=False
        ).last_hidden_state[0]
        hidden_SD = hidden[micro.source_index_S]
        if self.score is not None:
            values_S = hidden_SD.float() @ self.score.weight[0].float()
            return torch.stack([values_S, torch.zeros_like(values_S)])
        weight_VD, start = own_rows(self.model.get_output_embeddings().weight, self._tp)
        results = log_probs(
            copy_to(hidden_SD, self._tp),
            weight_VD,
            micro.targets_S,
            start,
            len(weight_VD),
            self._scale / micro.batch.temperature,
            self._tp,
            cap=self._cap,
        )
        return torch.stack(results)

    def _alone(self, ids_T: Tensor) -> Tensor:
        if self.score is not None:
            hidden_TD = self.model.base_model(input_ids=ids_T[None], use_cache=False).last_hidden_state[0]
            values_T: Tensor = hidden_TD.float() @ self.score.weight[0].float()
            return values_T
        return logprobs_alone(self.model, ids_T)


def read_config(directory: Path, trust_remote_code: bool) -> Any:
    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    for name in vars(config):
        # Dropout would make log-probs random.
        if name.endswith(("dropout", "_pdrop")) and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
    return config


def build(
    directory: Path,
    mesh: Mesh,
    dtype: torch.dtype,
    policy: PolicyConfig,
    *,
    value_head: bool,
    trust_remote_code: bool,
) -> tuple[PackedModel, dict[str, Split]]:
    """Build the model in `directory`, sharded and without values; parameter name -> its split before FSDP shards it."""
    attention.install()
    trusted = runs_own_code(directory, trust_remote_code)
    config = read_config(directory, trusted)
    with parameters_on_meta():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trusted)
    model.tie_weights()
    model.config._attn_implementation = attention.NAME
    # Training mode only adds randomness: dropout, jitter of routers.
    packed = PackedModel(model.eval(), value_head, mesh, dtype).eval()
    if fault := unproven_fault(packed.family, mesh.layout, policy.fsdp.unproven):
        raise UserError(f"policy.backend: {fault}")
    divided, by_id = experts.divide(model, mesh)
    by_id |= tensor_parallel.apply(model, mesh.tp, divided)
    linear_attention.separate(model)
    rotary.separate(model)
    if not policy.fsdp.compile:
        fused.fuse(model)
    splits = {name: by_id.get(id(parameter), Split()) for name, parameter in packed.named_parameters()}
    precision = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    settings, on_host = policy.fsdp, CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
    shard = partial(
        fully_shard,
        mp_policy=precision,
        offload_policy=on_host if settings.cpu_adam else OffloadPolicy(),
        reshard_after_forward=settings.reshard_after_forward,
    )
    for module in divided.values():
        shard(module, mesh=mesh.expert_fsdp)
    for layer in packed.layers:
        if settings.compile:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if policy.recompute == "full":
            layer.forward = _recomputed(layer.forward)
        shard(layer, mesh=mesh.fsdp)
    shard(packed, mesh=mesh.fsdp, reshard_after_forward=None)
    for module in fsdp_modules(packed):
        # The loss is a sum of shares: gradients are added up and divided by nothing.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    if hasattr(packed, "set_reduce_scatter_unused_params"):
        # A part that only some ranks use must not leave the others waiting; torch below 2.13 has no such option.
        packed.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    device = torch.device("cpu") if settings.cpu_adam else mesh.device
    packed._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(mesh.device))
    return packed, splits


def fsdp_modules(model: torch.nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _decoder_layers(model: Any) -> list[Any]:
    """Return the layers of a model of transformers, by the classes that it names itself: the outermost modules of them."""
    classes, inside = set(model._no_split_modules or ()), set[Any]()
    layers: list[Any] = []
    for module in model.base_model.modules():
        if type(module).__name__ in classes and module not in inside:
            layers.append(module)
            inside.update(module.modules())
    if not layers:
        raise UserError(f"fsdp: {type(model).__name__} of transformers does not say what its layers are (_no_split_modules)")
    return layers


def _recomputed(forward: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return call
