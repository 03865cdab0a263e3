"""MegatronModel: the Model surface on Megatron-Core."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial, wraps
from itertools import chain
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from fivefold.backend.self_check import check_batching
from fivefold.backend.shares import HostCopies
from fivefold.config.learners import PolicyConfig
from fivefold.distributed.groups import as_world
from fivefold.distributed.heartbeat import Interrupted
from fivefold.errors import UserError
from fivefold.megatron import dist_checkpoint, step
from fivefold.megatron.bridge.provider import architecture_of
from fivefold.megatron.chunks import build_chunks
from fivefold.megatron.layers.adapters import switched_off
from fivefold.megatron.layers.attention import make_packing
from fivefold.megatron.mesh import Mesh
from fivefold.megatron.offload import offload_of
from fivefold.megatron.optim.updater import build_updater
from fivefold.megatron.replica_check import verify_copies
from fivefold.megatron.routers import Routers
from fivefold.megatron.self_check import check_logprobs
from fivefold.megatron.transformer_config import transformer_config
from fivefold.megatron.weights import ModelWeights
from fivefold.models.bridges import bridge_fault
from fivefold.models.families import load_spec
from fivefold.models.spec import ModelSpec
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
        stored_in: str | None = None,
        seed: int = 0,
    ) -> None:
        """Load the Hugging Face model in `directory`, or the one it describes from a Megatron-Core checkpoint.

        `torch_dist` is that checkpoint. `total_updates` is the length of the schedule, and `updates_per_step` of them make a
        step; without `total_updates` the model only computes. With `value_head` the model ends in a value head, which starts
        at 0 if the directory has none (`score.weight`).

        With `read_weights=False` the values that a checkpoint will set stay unset: the weights, or with `policy.lora` the
        adapters. New adapters start as those that PEFT saved in `adapters`, or are drawn from `seed`. Merged weights are
        rounded for `stored_in`, the dtype of the engine or of files that store them; the policy's if left out.
        """
        self._mesh = mesh
        with mesh.active():
            self.spec: ModelSpec = load_spec(directory, value_head)
            self.spec.check_layout(mesh.layout, policy.megatron.pipeline_split)
            if policy.mtp.train:
                self.spec.check_mtp(mesh.layout)
            virtual = policy.megatron.pipeline_split.virtual_stages(mesh.layout)
            if fault := bridge_fault(policy.megatron.bridge_type, self.spec, mesh.layout, virtual):
                raise UserError(f"megatron.bridge_type {fault}")
            architecture = architecture_of(directory, self.spec)
            config = transformer_config(self.spec, mesh, policy, architecture)
            self._chunks = build_chunks(config, self.spec, mesh, policy, architecture.embedding_scale)
            self._routers = Routers(self._chunks, self.spec, mesh)
            fused = config.transformer_impl == "transformer_engine"
            self._batching = step.BatchingConfig(
                mesh.ranks,
                mesh.device,
                policy.tokens_per_micro_batch,
                self.spec.vocab,
                self.spec.value_head,
                mesh=mesh,
                experts=self._routers.layers,
                make_packing=partial(make_packing, fused),
                virtual=len(self._chunks),
                round_of=config.microbatch_group_size_per_vp_stage if len(self._chunks) > 1 else 1,
                fixed_length=mesh.layout.pp > 1 and not config.variable_seq_lengths,
                equal_length=self.spec.moe is not None and config.moe_token_dispatcher_type == "allgather",
                share_prefix=policy.shares_prefix_on(mesh.layout) and not fused,
                mtp_layers=config.mtp_num_layers or 0,
                mtp_factor=policy.mtp.loss_scaling_factor,
                sequences=policy.sequences_per_forward,
            )
            self._weights = ModelWeights(
                self._chunks, self.spec, mesh, policy, directory, bucket_mb=bucket_mb, read_weights=read_weights,
                torch_dist=torch_dist, adapters=adapters, stored_in=stored_in, seed=seed,
            )  # fmt: skip
            self.value_head_is_new = self._weights.value_head_is_new
            """The value head was initialized to 0, because the directory has none."""
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
            self._copies = HostCopies(mesh.device)
            self._offload = offload_of(policy.offload, mesh.device, self._chunks, self._updater)
            if self.spec.stored and read_weights:
                compute = partial(step.forward_only, self._models, batching=check_batching(self._batching))
                check_logprobs(directory, compute, self.spec, config.params_dtype, mesh)

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

        With `batch.records_routes` this also fills in Column.ROUTES; if routes are given, it uses them.
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
        updater.begin()
        self._routers.reset_counts()
        biases = self._routers.biases()
        try:
            gradients = step.forward_backward(
                self._models,
                self._finalize,
                batch,
                loss_fn,
                self._batching,
                list(self._routers),
                1.0 if updater.loss_scale is None else float(updater.loss_scale.scale),
            )
        except Interrupted:
            # Part of the batch has already moved the router biases; the whole batch moves them when the update is repeated.
            self._routers.restore(biases)
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
        if updater.optimizer.config.log_num_zeros_in_grad:
            metrics["zero_gradients"] = float(updater.optimizer.count_zeros())
        if skipped:
            self._routers.restore(biases)
        else:
            updater.schedule.step(1)
            lr = max(group["lr"] for group in updater.optimizer.param_groups)
            updater.step(grad_norm)
        return StepReport(
            loss=loss,
            grad_norm=grad_norm,
            lr=float(lr),
            metrics=metrics | self._routers.metrics(gradients.tokens),
            micro_batches=gradients.micro_batches,
            tokens=gradients.tokens,
            sequences=gradients.sequences,
            skipped=skipped,
            loss_scale=loss_scale,
            overflowed=overflowed,
        )

    def _settle(self) -> None:
        """Complete the parameters on every rank: `overlap_param_gather` leaves the last update's to the next forward."""
        # Gradients and optimizer are needed only for a step, so they stay where they are.
        self._offload.onload("parameters")
        if self._updater is not None:
            self._updater.complete_parameters()

    @_on_its_mesh
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) on every rank, adapters merged; collective."""
        self._settle()
        return self._mesh.iterate(self._weights.merged())

    def lost_to_rounding(self) -> float | None:
        """Return the share of what adapters add that the last stream of weights does not show in the engine's dtype.

        It is 1 minus the projection of the difference that they make onto what they add, over the whole model; None if they
        add nothing. Collective.
        """
        return self._weights.lost_to_rounding()

    @_on_its_mesh
    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (PEFT name, full A or B) of the adapters on every rank; collective."""
        self._settle()
        return self._mesh.iterate(self._weights.adapters())

    @_on_its_mesh
    def mtp_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) of the layers of multi-token prediction on every rank; collective."""
        assert self.has_mtp, "a model built without policy.mtp.train has no such layers"
        self._settle()
        return self._mesh.iterate(self._weights.mtp())

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

    def prepare_offload(self) -> None:
        """Allocate the host memory for the next offload in background threads, with that of moments to come."""
        self._offload.prepare()

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
        # It brings moments, which are offloaded before the first sampling. Reading takes longer than allocating.
        self._offload.prepare()
        self.onload()
        dist_checkpoint.load(path, self.spec, self._chunks, self._updater, self._mesh)


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

    def prepare_offload(self) -> None:
        """Do nothing: see `offload`."""

    def onload(self) -> None:
        self._model.onload()
