"""Mixture-of-experts layers in plain PyTorch: router, experts, and the statistics that a step records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import (
    compute_routing_scores_for_aux_loss,
    get_default_pg_collection,
    topk_routing_with_score_function,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from fivefold.backend import kernels
from fivefold.backend.routing import Choice, Routing
from fivefold.megatron.layers.expert_exchange import ExpertExchange


class _AddLoss(torch.autograd.Function):
    """Pass activations through and let `loss` take part in backward with derivative 1."""

    @staticmethod
    def forward(ctx: Any, activations: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return activations

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


class Router(TopKRouter):
    """Megatron-Core's top-k choice; its losses and counts leave out padding and do not depend on any partitioning.

    With T tokens in the update and T_s in sequence s, f and P over the experts, each loss is a sum of shares:

    - `seq_aux_loss` (DeepSeek-V3, eq. 17-20): coef · Σ_s T_s/T · E Σ_i f_i(s) P_i(s), the mean over tokens of the sequence's
      balance;
    - `aux_loss` (Switch, eq. 4-6): coef · Σ_m T_m/T · E Σ_i f_i(m) P_i(m) over micro-batches m; by this definition it
      depends on how the replicas and micro-batches are divided;
    - z-loss (ST-MoE, eq. 5): coef · mean over tokens of logsumexp(logits)².
    """

    update_scale: float = 0.0
    """Scale of the router losses: 1 / all tokens of the update, times the loss scale; 0 outside an update."""
    place: int | None = None
    """Index among this rank's routers whose choice can be replayed; None for multi-token prediction, which no engine has."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        # Megatron-Core leaves the router in the parameters' dtype on the CPU until its first use.
        device = torch.cuda.current_device()
        self.register_buffer("load_E", torch.zeros(self.num_experts, dtype=torch.float32, device=device), persistent=False)
        self.register_buffer("balance", torch.zeros((), dtype=torch.float32, device=device), persistent=False)
        self.register_buffer("replayed", torch.zeros(2, dtype=torch.float32, device=device), persistent=False)
        self.load_E: Tensor
        """Number of real tokens that chose each expert since the step began, on this rank."""
        self.balance: Tensor
        """Sum of balance losses since the step began, times the tokens of the update, on this rank."""
        self.replayed: Tensor
        """[2] routes given for real tokens since the step began, and how many the router also chose, on this rank."""

    def forward(self, hidden: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
        """[T, E] weights and [T, E] choice of the local tokens, and the [T, K] numbers of the chosen experts."""
        self._maintain_float32_expert_bias()
        sequence_mask_ST, routes_TLK = routing.sequence_mask_ST, routing.routes_TLK
        logits_TE = self.gating(hidden).view(-1, self.num_experts)
        logits_TE = self._add_z_loss(logits_TE, sequence_mask_ST)
        choice = Choice(None if routes_TLK is None or self.place is None else routes_TLK[:, self.place])
        weights_TE, chosen_TE = self.choose(logits_TE, choice)
        if routing.recorded is not None and self.place is not None:
            routing.recorded[self.place] = choice.chosen_TK
        if torch.is_grad_enabled():
            with torch.no_grad():
                real_T = sequence_mask_ST.any(0)
                counts_E = (chosen_TE & real_T[:, None]).sum(0)
                self.load_E += counts_E
                if choice.routes_TK is not None:
                    self.replayed += choice.agreement(real_T)
                if self.enable_expert_bias:
                    self.local_tokens_per_expert += counts_E
            weights_TE = self._add_balance_loss(weights_TE, logits_TE, sequence_mask_ST)
        return weights_TE, chosen_TE, choice.taken_TK

    def choose(self, logits_TE: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
        """Choose experts with Megatron-Core's routing, without its own losses and counts."""
        config = self.config
        weights_TE, chosen_TE = topk_routing_with_score_function(
            logits_TE,
            self.topk,
            use_pre_softmax=config.moe_router_pre_softmax,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            scaling_factor=config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            expert_bias=self.expert_bias,
            router_replay=choice,
        )
        return weights_TE, chosen_TE

    def _add_z_loss(self, logits_TE: Tensor, sequence_mask_ST: Tensor) -> Tensor:
        coefficient = self.config.moe_z_loss_coeff
        if not coefficient or not torch.is_grad_enabled():
            return logits_TE
        squares_T = logits_TE.logsumexp(-1).square() * sequence_mask_ST.any(0)
        added: Tensor = _AddLoss.apply(logits_TE, self.update_scale * coefficient * squares_T.sum())
        return added

    def _add_balance_loss(self, weights_TE: Tensor, logits_TE: Tensor, sequence_mask_ST: Tensor) -> Tensor:
        by_sequence, by_micro_batch = (self.get_aux_loss_coeff(name) for name in ("seq_aux_loss", "aux_loss"))
        if not by_sequence and not by_micro_batch:
            return weights_TE
        chosen_TE, scores_TE = compute_routing_scores_for_aux_loss(logits_TE, self.topk, self.score_function)
        groups = sequence_mask_ST.to(scores_TE.dtype)
        chances_SE = groups @ scores_TE
        with torch.no_grad():
            # A sequence's counts are summed over all ranks that hold a part of it; one more column counts its tokens.
            counts = torch.cat([groups @ chosen_TE.to(groups.dtype), groups.sum(1, keepdim=True)], 1)
            torch.distributed.all_reduce(counts, group=self.tp_cp_group)
            counts_SE, tokens_S = counts[:, :-1], counts[:, -1:]
        loss = by_sequence * (counts_SE / tokens_S.clamp(min=1) * chances_SE).sum()
        if by_micro_batch:
            frequency_E = counts_SE.sum(0) / tokens_S.sum().clamp(min=1)
            loss = loss + by_micro_batch * (frequency_E * chances_SE.sum(0)).sum()
        loss = loss * (self.num_experts / self.topk)
        with torch.no_grad():
            self.balance += loss.detach()
        added: Tensor = _AddLoss.apply(weights_TE, self.update_scale * loss)
        return added


class MoE(MoELayer):
    """Megatron-Core's layer; its router receives the `Routing` in place of a padding mask.

    Tokens reach their experts by our exchange, or by Megatron-Core's dispatcher where that is to gather them, or to compute
    shared experts meanwhile.
    """

    def __init__(self, config: TransformerConfig, *given: Any, **named: Any) -> None:
        groups = named.pop("pg_collection", None) or get_default_pg_collection()
        super().__init__(config, *given, pg_collection=groups, **named)
        exchanges = config.moe_token_dispatcher_type == "alltoall" and not config.moe_shared_expert_overlap
        assert config.num_moe_experts is not None
        self.exchange = ExpertExchange(config.num_moe_experts, groups) if exchanges else None

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Routing | None = None
    ) -> tuple[Tensor, None]:
        assert isinstance(padding_mask, Routing), "the layer needs to know which tokens are real"

        def compute(hidden: Tensor) -> Tensor:
            shared = self.shared_experts_compute(hidden)
            weights, chosen, experts = self.router(hidden, padding_mask)
            if self.exchange is not None:
                dispatched = self.exchange.dispatch(hidden.flatten(0, -2), weights, chosen, experts)
                output, _ = self.experts(dispatched.tokens_MD, dispatched.counts_E, dispatched.weights_M)
                combined = self.exchange.combine(output, dispatched).view_as(hidden)
                return combined if shared is None else combined + shared
            tokens, weights = self.preprocess(hidden, weights, chosen)
            tokens, weights = self.dispatch(tokens, weights)
            output, _ = self.routed_experts_compute(tokens, weights)
            result: Tensor = self.postprocess(self.combine(output), shared)
            return result

        if self.moe_layer_recompute and self.training:
            return tensor_parallel.checkpoint(compute, False, hidden_states), None
        return compute(hidden_states), None


class GroupedExperts(MegatronModule):
    """The experts of this rank as two stacked weights: SwiGLU, weighted by the router, summed by the dispatcher."""

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None
    ) -> None:
        super().__init__(config=config)
        assert pg_collection is not None
        self.ep_group, self.etp_group, self.dp_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        self.count, ffn = num_local_experts, config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()

        def weight(*sizes: int) -> torch.nn.Parameter:
            parameter: Any = torch.nn.Parameter(torch.empty(*sizes, dtype=config.params_dtype, device=device))
            # Every rank of a replica holds different elements, so all count in the gradient norm. Gradients are reduced over
            # expert replicas.
            parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 0, 1
            parameter.allreduce = False
            return parameter  # type: ignore[no-any-return]

        self.fc1 = weight(num_local_experts, 2, ffn, config.hidden_size)
        """[experts, gate and up, ffn, width]"""
        self.fc2 = weight(num_local_experts, config.hidden_size, ffn)

    def forward(self, tokens_TD: Tensor, tokens_per_expert: Tensor, weights_T: Tensor) -> tuple[Tensor, None]:
        """Return the experts' outputs for tokens sorted by expert, times their weights."""
        product = self._up(tokens_TD, tokens_per_expert)
        selective = self.config.recompute_granularity == "selective"
        if self.training and selective and "moe_act" in self.config.recompute_modules:
            recompute = CheckpointWithoutOutput()
            activated = recompute.checkpoint(_swiglu, product, weights_T)
            output = self._down(activated, tokens_per_expert)
            recompute.discard_output_and_register_recompute(output)
            return output, None
        return self._down(_swiglu(product, weights_T), tokens_per_expert), None

    def _up(self, tokens_TD: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """[T, gate and up] of this rank's part of the experts."""
        return self._product(tokens_TD, self.fc1.flatten(1, 2), tokens_per_expert)

    def _down(self, activated: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """[T, width]: what this rank's part of the experts adds to the output."""
        return self._product(activated, self.fc2, tokens_per_expert)

    def _product(self, tokens: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """[T, in] x [experts, out, in] -> [T, out], each token with its own expert's weight."""
        if self.config.moe_grouped_gemm and _fits_grouped(tokens, weight):
            ends = tokens_per_expert.to(tokens.device, torch.int32, non_blocking=True).cumsum(0, dtype=torch.int32)
            return _GroupedProduct.apply(tokens, weight, ends)  # type: ignore[no-any-return]
        parts = tokens.split(tokens_per_expert.tolist())
        # An empty product keeps a weight in the autograd graph if no token reached its expert.
        return torch.cat([part @ matrix.t() for part, matrix in zip(parts, weight, strict=True)])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensor]:
        """Return sharded tensors with the experts' numbers in the whole model, so that any layout can read them."""
        axes = len(sharded_offsets)
        ep, etp = (self.ep_group.rank(), self.ep_group.size()), (self.etp_group.rank(), self.etp_group.size())
        sharded = {}
        for name, parameter, axis in (("fc1", self.fc1, 2), ("fc2", self.fc2, 2)):
            sharded[f"{prefix}{name}"] = ShardedTensor.from_rank_offsets(
                f"{prefix}{name}",
                parameter,
                *sharded_offsets,
                (axes, *ep),
                (axes + axis, *etp),
                replica_id=(0, 0, self.dp_group.rank()),
                prepend_axis_num=axes,
            )
        return sharded

    def by_expert(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (`7.fc1`, view [2·ffn, width]) and (`7.fc2`, view) with the expert's number in the whole model."""
        first = self.ep_group.rank() * self.count
        for index in range(self.count):
            yield f"{first + index}.fc1", self.fc1.detach()[index].flatten(0, 1)
            yield f"{first + index}.fc2", self.fc2.detach()[index]


def _swiglu(product: Tensor, weights_T: Tensor) -> Tensor:
    if kernels.serve(product):
        from fivefold.backend.kernels.swiglu import swiglu

        return swiglu(product, weights_T)
    gate, up = product.chunk(2, -1)
    return (F.silu(gate) * up * weights_T[:, None]).to(product.dtype)


def _fits_grouped(tokens: Tensor, weight: Tensor) -> bool:
    """Whether grouped_mm supports these: bfloat16 on CUDA, rows of a multiple of 16 bytes, at least one row."""
    fast = tokens.is_cuda and tokens.dtype == torch.bfloat16
    return fast and len(tokens) > 0 and weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0


class _GroupedProduct(torch.autograd.Function):
    """grouped_mm with contiguous gradients, which are zero for experts without tokens."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight, ends)
        return F.grouped_mm(tokens, weight.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        tokens, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()
        # A frozen weight needs no gradient.
        of_weight = F.grouped_mm(grad.t(), tokens, offs=ends) if ctx.needs_input_grad[1] else None
        return F.grouped_mm(grad, weight, offs=ends), of_weight, None
