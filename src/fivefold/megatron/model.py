"""MegatronModel: the Model surface on Megatron-Core."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from itertools import chain
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from fivefold.config.learners import PolicyConfig
from fivefold.distributed.groups import as_world
from fivefold.distributed.heartbeat import Interrupted
from fivefold.distributed.objects import all_gather_json, broadcast_json
from fivefold.distributed.ranks import Ranks
from fivefold.errors import first_line, sentence_of
from fivefold.megatron import dist_checkpoint, step
from fivefold.megatron.bridge import SafetensorsSource, TorchDistSource, WeightStream, load_adapters, load_parameters
from fivefold.megatron.bridge.external import external_bridge
from fivefold.megatron.chunks import (
    MergedWeights,
    adapter_weights,
    add_adapters,
    build_chunks,
    named_weights,
    routers,
)
from fivefold.megatron.layers.adapters import LostToRounding, switched_off
from fivefold.megatron.layers.routing import MoELayers
from fivefold.megatron.mesh import Mesh
from fivefold.megatron.offload import Offload
from fivefold.megatron.optim.updater import build_updater
from fivefold.megatron.replica_check import verify_copies
from fivefold.megatron.transformer_config import DTYPES, transformer_config
from fivefold.models.adapters import adapter_tensors, check_adapter_files
from fivefold.models.families import load_spec, mtp_parameters_of
from fivefold.models.spec import ModelSpec
from fivefold.models.tensor_files import check_tensor_files
from fivefold.models.torch_dist import check_torch_dist
from fivefold.types import LossFn, StepReport, TokenBatch

P = ParamSpec("P")
R = TypeVar("R")


def _on_its_mesh(method: Callable[Concatenate[MegatronModel, P], R]) -> Callable[Concatenate[MegatronModel, P], R]:
    """Activate the model's mesh during the call, so that Megatron-Core uses its layout."""

    @wraps(method)
    def call(self: MegatronModel, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._mesh.active():
            return method(self, *args, **kwargs)

    return call


class MegatronModel:
    """A language model, or one with a value head, sharded over a mesh; it trains if `total_updates` is given."""

    def __init__(
        self,
        directory: Path,
        policy: PolicyConfig,
        mesh: Mesh,
        *,
        total_updates: int | None = None,
        updates_per_step: int = 1,
        bucket_mb: int = 256,
        read_weights: bool = True,
        value_head: bool = False,
        torch_dist: Path | None = None,
        adapters: Path | None = None,
        engine_dtype: str | None = None,
        seed: int = 0,
    ) -> None:
        """Load the Hugging Face model in `directory`, or the one it describes from a Megatron-Core checkpoint.

        `torch_dist` is that checkpoint. `total_updates` is the length of the schedule, and `updates_per_step` of them make a
        step; without `total_updates` the model only computes. With `value_head` the model ends in a value head, which starts
        at 0 if the directory has none (`score.weight`).

        With `read_weights=False` the values that a checkpoint will set stay unset: the weights, or with `policy.lora` the
        adapters. New adapters start as those that PEFT saved in `adapters`, or are drawn from `seed`. With `engine_dtype`
        every stream of weights measures how much of what adapters add is lost in that dtype (`lost_to_rounding`).
        """
        self._mesh = mesh
        with mesh.active():
            self.spec: ModelSpec = load_spec(directory, value_head)
            self.spec.check_layout(mesh.layout, policy.megatron.pipeline_split)
            if policy.mtp.train:
                self.spec.check_mtp(mesh.layout)
            lora, loads = policy.lora.spec, read_weights or policy.lora.spec is not None
            config = transformer_config(self.spec, mesh, policy)
            self._chunks = build_chunks(config, self.spec, mesh, policy)
            self._routers = routers(self._chunks)
            own = [layer for layer in self._routers if layer < self.spec.layers]
            for number, layer in enumerate(own):
                self._routers[layer].place = number
            self._batching = step.BatchingConfig(
                mesh,
                policy.tokens_per_micro_batch,
                self.spec.vocab,
                self.spec.value_head,
                fused=config.transformer_impl == "transformer_engine",
                experts=_moe_layers(self.spec, own),
                virtual=len(self._chunks),
                round_of=config.microbatch_group_size_per_vp_stage if len(self._chunks) > 1 else 1,
                fixed_length=mesh.layout.pp > 1 and not config.variable_seq_lengths,
                equal_length=self.spec.moe is not None and config.moe_token_dispatcher_type == "allgather",
                share_prefix=policy.shares_prefix_on(mesh.layout) and config.transformer_impl != "transformer_engine",
                mtp_layers=config.mtp_num_layers or 0,
                mtp_factor=policy.mtp.loss_scaling_factor,
            )
            kind = policy.megatron.bridge_type
            if value_head and kind != "native":
                raise ValueError(f"bridge_type must be native for a critic or a reward model: got {kind}")
            if kind != "native" and torch_dist is not None:
                raise ValueError(f"bridge_type must be native for a checkpoint of Megatron-Core: got {kind}")
            if kind != "native" and lora is not None:
                raise ValueError(f"bridge_type must be native for adapters (policy.lora): got {kind}")
            if loads:
                check = (
                    partial(check_tensor_files, directory) if torch_dist is None else partial(check_torch_dist, torch_dist)
                )
                _check_files(partial(check, has_mtp=policy.mtp.train), self.spec, mesh.ranks)
            external = None if kind == "native" else external_bridge(kind, self._chunks, directory, self.spec)
            self.value_head_is_new = False
            """The value head was initialized to 0, because the directory has none."""
            if loads and external is not None:
                external.load(directory)
            elif loads:
                source = (
                    SafetensorsSource(directory, self.spec) if torch_dist is None else TorchDistSource(torch_dist, self.spec)
                )
                self.value_head_is_new = value_head and not source.has_value_head
                load_parameters(named_weights(self._chunks), source, self.spec, mesh.ranks.coords, mesh.layout)
            if lora is not None:
                add_adapters(self._chunks, self.spec, lora, mesh)
                if read_weights:
                    if adapters is not None:
                        _check_files(lambda spec: check_adapter_files(adapters, spec, lora), self.spec, mesh.ranks)
                    place = (mesh.ranks.coords, mesh.layout)
                    load_adapters(adapter_weights(self._chunks), adapters, policy.lora.init, seed, self.spec, lora, *place)
            self._lost: LostToRounding | None = None
            if lora is not None and engine_dtype is not None:
                self._lost = LostToRounding(DTYPES[engine_dtype], mesh.device)

            weights = named_weights
            if lora is not None:
                weights = partial(MergedWeights, place=mesh.ranks.coords, lost=self._lost)
            stream = WeightStream(lambda: weights(self._chunks), self.spec, mesh, bucket_mb)
            self._stream = stream if external is None else external.weights
            self._lora, self._bucket_mb = lora, bucket_mb
            self.has_mtp = policy.mtp.train
            """The model trains layers of multi-token prediction."""
            self._updater = None
            self._finalize = step.FinalizeOnce()
            if total_updates is None:
                for chunk in self._chunks:
                    chunk.requires_grad_(False)
                self._models: list[Any] = list(self._chunks)
            else:
                with as_world(mesh.ranks.members):
                    self._updater = build_updater(self._chunks, config, policy, total_updates, updates_per_step)
                self._models = list(self._updater.ddps)
                config.finalize_model_grads_func = self._finalize
                config.grad_scale_func = self._updater.optimizer.scale_loss
            self._copies = dist_checkpoint.HostCopies(mesh.device)
            self._offload = Offload(policy.offload, mesh.device, self._chunks, self._updater)

    @property
    def version(self) -> int:
        """Number of optimizer steps taken."""
        return 0 if self._updater is None else int(self._updater.schedule.num_steps)

    def modules(self) -> Iterator[torch.nn.Module]:
        """All modules of this rank's chunks of the model."""
        return chain.from_iterable(chunk.modules() for chunk in self._chunks)

    @_on_its_mesh
    def forward(self, batch: TokenBatch) -> Tensor:
        """[T] log-probs of the response tokens, or values, on the host of every rank of the replica.

        With `batch.records_routes` this also sets `batch.routes_TLK`; if routes are given, it uses them.
        """
        self._settle()
        for model in self._models:
            model.eval()
        return step.forward_only(self._models, batch, self._batching)

    @_on_its_mesh
    def train_step(self, batch: TokenBatch, loss_fn: LossFn) -> StepReport:
        """Take one optimizer step over the whole batch; all ranks skip it if loss or gradients are not finite."""
        assert self._updater is not None, "a model built without total_updates does not train"
        self.onload()
        updater = self._updater
        for ddp in updater.ddps:
            ddp.train()
            ddp.zero_grad_buffer()
        updater.optimizer.zero_grad()
        biases = [None if router.expert_bias is None else router.expert_bias.clone() for router in self._routers.values()]
        for router in self._routers.values():
            router.load_E.zero_()
            router.balance.zero_()
            router.replayed.zero_()
        try:
            gradients = step.forward_backward(
                self._models,
                self._finalize,
                batch,
                loss_fn,
                self._batching,
                list(self._routers.values()),
                1.0 if updater.loss_scale is None else float(updater.loss_scale.scale),
            )
        except Interrupted:
            # Part of the batch has already moved the router biases; the whole batch moves them when the update is repeated.
            self._restore_biases(biases)
            raise
        updater.optimizer.prepare_grads()
        # The first wait for the device: the host's work for the gradients is queued by now.
        grad_norm = float(updater.optimizer.get_grad_norm())
        loss, metrics = step.loss_and_metrics(gradients, self._mesh)
        skipped = not (math.isfinite(loss) and math.isfinite(grad_norm))
        lr, loss_scale, overflowed = 0.0, None, False
        if updater.loss_scale is not None:
            loss_scale = float(updater.loss_scale.scale)
            overflowed = skipped and math.isfinite(loss) and updater.loss_scale.can_fall
            updater.loss_scale.follow(skipped)
        if skipped:
            self._restore_biases(biases)
        else:
            updater.schedule.step(1)
            lr = max(group["lr"] for group in updater.optimizer.param_groups)
            self._update(grad_norm)
        return StepReport(
            loss=loss,
            grad_norm=grad_norm,
            lr=float(lr),
            metrics=metrics | self._expert_metrics(gradients.tokens),
            micro_batches=gradients.micro_batches,
            tokens=gradients.tokens,
            sequences=gradients.sequences,
            skipped=skipped,
            loss_scale=loss_scale,
            overflowed=overflowed,
        )

    def _restore_biases(self, biases: list[Tensor | None]) -> None:
        """Undo what a rejected update did to the router biases (DeepSeek-V3, 2412.19437, section 2.1.2)."""
        for router, bias in zip(self._routers.values(), biases, strict=True):
            if bias is not None:
                router.expert_bias.copy_(bias)

    def _update(self, grad_norm: float) -> None:
        """Clip the gradients, which must be finite, and take the optimizer step."""
        assert self._updater is not None
        for part in self._updater.optimizer.chained_optimizers:
            parameters = part.get_parameters()
            if parameters:
                decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, grad_norm, use_decoupled_grad=decoupled)
        updated = self._updater.optimizer.step_with_ready_grads()
        assert updated, "the optimizer refused its gradients"

    @torch.no_grad()
    def _expert_metrics(self, tokens: int) -> dict[str, float]:
        """Return metrics of the experts, the same on every rank.

        They are the load of each layer's experts (largest over mean), the routers' losses per token, and the share of given
        routes that the routers choose as well.
        """
        if self.spec.moe is None:
            return {}
        found: dict[str, float] = {}
        if self._routers:
            rows = torch.stack([torch.cat([r.load_E, r.balance[None], r.replayed]) for r in self._routers.values()])
            dist.all_reduce(rows, group=self._mesh.stage)
            for layer, row in zip(self._routers, rows.double().cpu(), strict=True):
                load_E, (balance, replayed, same) = row[:-3], row[-3:].tolist()
                found[f"moe/load_max/layer_{layer:02d}"] = float(load_E.max() / load_E.mean().clamp(min=1e-30))
                found[f"moe/aux_loss/layer_{layer:02d}"] = balance / max(1, tokens)
                if replayed:
                    found[f"moe/router_agreement/layer_{layer:02d}"] = same / replayed
        if self._mesh.layout.pp > 1:
            everyone = all_gather_json(found, self._mesh.ranks.pp)
            found = {name: value for stage in everyone for name, value in stage.items()}
        by_name = {
            kind: {name: value for name, value in sorted(found.items()) if name.startswith(f"moe/{kind}/")}
            for kind in ("load_max", "aux_loss", "router_agreement")
        }
        loads, losses, same = by_name["load_max"], by_name["aux_loss"], by_name["router_agreement"]
        whole = {"moe/load_max": max(loads.values()), "moe/aux_loss": math.fsum(losses.values())}
        if same:
            whole["moe/router_agreement"] = math.fsum(same.values()) / len(same)
        return loads | same | whole

    def _settle(self) -> None:
        """Complete the parameters on every rank: `overlap_param_gather` leaves the last update's to the next forward."""
        # Gradients and optimizer are needed only for a step, so they stay where they are.
        self._offload.onload("parameters")
        if self._updater is not None:
            for ddp in self._updater.ddps:
                groups = ddp.bucket_groups + ddp.expert_parallel_bucket_groups
                if ddp.ddp_config.overlap_param_gather and not all(group.param_gather_dispatched for group in groups):
                    ddp.start_param_sync(force_sync=True)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) on every rank, adapters merged; collective."""
        with self._mesh.active():
            self._settle()
        if self._lost is not None:
            self._lost.squares_2.zero_()
        return self._mesh.iterate(self._stream())

    def lost_to_rounding(self) -> tuple[float, float]:
        """Return two norms over the whole model for the last stream of weights; collective.

        The first is the norm of what is lost of the adapters' contribution in the engine's dtype; the second is the norm of
        that contribution.
        """
        assert self._lost is not None, "a model built without adapters or engine_dtype counts nothing"
        squares_2 = self._lost.squares_2.cpu()
        dist.all_reduce(squares_2, group=self._mesh.ranks.members)
        lost, share = squares_2.sqrt().tolist()
        return lost, share

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (PEFT name, full A or B) of the adapters on every rank; collective."""
        assert self._lora is not None, "a model built without policy.lora has no adapters"
        with self._mesh.active():
            self._settle()
            tensors = adapter_tensors(self.spec, self._lora)
            stream = WeightStream(lambda: adapter_weights(self._chunks), self.spec, self._mesh, self._bucket_mb, tensors)
        return self._mesh.iterate(stream())

    def mtp_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) of the layers of multi-token prediction on every rank; collective."""
        assert self.has_mtp, "a model built without policy.mtp.train has no such layers"
        with self._mesh.active():
            self._settle()
            own = partial(named_weights, self._chunks)
            stream = WeightStream(own, self.spec, self._mesh, self._bucket_mb, mtp_parameters_of(self.spec))
        return self._mesh.iterate(stream())

    @_on_its_mesh
    def verify(self) -> None:
        """Compare copies that must be equal on several ranks; raises RuntimeError naming parameter and ranks. Collective."""
        self._settle()
        verify_copies(self._chunks, self._mesh)

    @_on_its_mesh
    def offload(self, parameters: bool = True) -> dict[str, int]:
        """Move to the host what `policy.offload` names; return the bytes that left the device by part.

        With `parameters=False` the parameters stay on the device.
        """
        leaving = self._offload.leaving(parameters)
        if leaving:
            self._settle()
        return self._offload.offload(leaving)

    @_on_its_mesh
    def onload(self) -> None:
        """Move offloaded state back to the device; every method that needs the state calls this itself."""
        self._offload.onload()

    def save(self, path: Path) -> None:
        """Write a layout-independent checkpoint into the directory `path`; collective."""
        self.snapshot(copies=False)(path)

    @_on_its_mesh
    def prepare_snapshots(self) -> None:
        """Allocate the memory for snapshot copies in a background thread. The model must have taken a step. Collective."""
        self.onload()
        self._copies.prepare(dist_checkpoint.share_of(self._chunks, self._updater, self._mesh))

    @_on_its_mesh
    def snapshot(self, copies: bool) -> Callable[[Path], list[Path]]:
        """Return a function that writes this rank's share of a layout-independent checkpoint and returns its files.

        The function is passed the directory. With `copies` the share is copied to the host first, so that a thread may write
        it while the model continues. Collective.
        """
        self.onload()
        self._settle()
        share = dist_checkpoint.share_of(self._chunks, self._updater, self._mesh)
        return (self._copies.of(share) if copies else share).write

    @_on_its_mesh
    def load(self, path: Path) -> None:
        """Read a checkpoint written on any layout; collective."""
        self.onload()
        dist_checkpoint.load(path, self._chunks, self._updater, self._mesh)


class WithoutAdapters:
    """The base of a model with adapters: the same weights, with the adapters switched off."""

    def __init__(self, model: MegatronModel) -> None:
        self._model = model

    def forward(self, batch: TokenBatch) -> Tensor:
        """[T] log-probs of the response tokens, on the host of every rank of the replica."""
        with switched_off(self._model._chunks):
            return self._model.forward(batch)

    def offload(self, parameters: bool = True) -> dict[str, int]:
        """Return {}: there is no state besides that of the model with adapters."""
        return {}

    def onload(self) -> None:
        self._model.onload()


def _moe_layers(spec: ModelSpec, own: Sequence[int]) -> MoELayers | None:
    """Return which layers have experts and which of them this rank holds; None for a model without experts."""
    routes = spec.routes
    return None if routes is None else MoELayers(routes, tuple(map(routes.layers.index, own)))


def _check_files(check: Callable[[ModelSpec], None], spec: ModelSpec, ranks: Ranks) -> None:
    """Raise ValueError on all ranks of the model if the first one finds the tensor files unusable. Collective."""
    fault: str | None = None
    if ranks.leads:
        try:
            check(spec)
        except (ValueError, OSError) as error:
            fault = sentence_of(error) or first_line(error)
    if fault := broadcast_json(fault, ranks.first, ranks.members):
        raise ValueError(fault)
