"""MegatronModel: the Model surface on Megatron-Core."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from fivefold.config.schema import PolicyConfig
from fivefold.megatron import checkpoint, step
from fivefold.megatron.bridge import SafetensorsSource, WeightStream, load_parameters
from fivefold.megatron.bridge.foreign import foreign_bridge
from fivefold.megatron.bridge.load import check_names
from fivefold.megatron.build import DTYPES, build_model, build_trainer, global_parameters, transformer_config
from fivefold.megatron.mesh import Mesh
from fivefold.model_shape import ModelShape, load_shape
from fivefold.types import LossFn, StepReport, TokenBatch


class MegatronModel:
    """A language model cut over a mesh; it trains when it was given a number of updates."""

    def __init__(
        self,
        directory: Path,
        policy: PolicyConfig,
        mesh: Mesh,
        *,
        total_updates: int | None = None,
        bucket_mb: int = 256,
        read_weights: bool = True,
    ) -> None:
        """Load the Hugging Face model in `directory`.

        `total_updates` is the length of the schedule; without it the model only computes log-probs.
        `read_weights` False leaves the weights unset: a checkpoint will be loaded.
        """
        self.shape: ModelShape = load_shape(directory)
        self.shape.check_layout(mesh.layout)
        self._mesh = mesh
        config = transformer_config(self.shape, mesh, policy)
        self._module = build_model(config, self.shape, mesh)
        fused = config.transformer_impl == "transformer_engine"
        self._terms = step.Terms(mesh, policy.tokens_per_micro_batch, self.shape.vocab, fused)
        parameters = global_parameters(self._module, config)
        kind = policy.megatron.bridge_type
        foreign = None if kind == "native" else foreign_bridge(kind, self._module, directory, self.shape)
        if read_weights and foreign is not None:
            foreign.load(directory)
        elif read_weights:
            source = SafetensorsSource(directory)
            check_names(source, self.shape, directory)
            load_parameters(parameters, source, self.shape, mesh.tp.rank(), mesh.layout.tp, mesh.layout.pp)
        stream = WeightStream(parameters, self.shape, mesh, DTYPES[policy.dtype], bucket_mb)
        self._stream = stream if foreign is None else foreign.weights
        self._trainer = None
        self._finalize = step.FinalizeOnce()
        if total_updates is None:
            self._module.requires_grad_(False)
            self._model: Any = self._module
        else:
            self._trainer = build_trainer(self._module, config, policy, total_updates)
            self._model = self._trainer.ddp
            config.finalize_model_grads_func = self._finalize
            config.grad_scale_func = self._trainer.optimizer.scale_loss

    @property
    def version(self) -> int:
        """Optimizer steps taken."""
        return 0 if self._trainer is None else int(self._trainer.schedule.num_steps)

    def forward(self, batch: TokenBatch) -> Tensor:
        """[T] log-prob of each response token, 0 elsewhere, on the host of every rank of the replica."""
        self._model.eval()
        return step.forward_only(self._model, batch, self._terms)

    def train_step(self, batch: TokenBatch, loss_fn: LossFn) -> StepReport:
        """One optimizer step over the whole batch."""
        assert self._trainer is not None, "a model built without total_updates does not train"
        trainer = self._trainer
        self._model.train()
        trainer.ddp.zero_grad_buffer()
        trainer.optimizer.zero_grad()
        gradients = step.forward_backward(self._model, self._finalize, batch, loss_fn, self._terms)
        trainer.schedule.step(1)
        lr = max(group["lr"] for group in trainer.optimizer.param_groups)
        updated, grad_norm, _ = trainer.optimizer.step()
        assert updated, "the optimizer refused its gradients"
        return StepReport(
            loss=gradients.loss,
            grad_norm=float(grad_norm),
            lr=float(lr),
            metrics=gradients.metrics,
            micro_batches=gradients.micro_batches,
            tokens=gradients.tokens,
            sequences=gradients.sequences,
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) on every rank; collective."""
        return self._stream()

    def save(self, path: Path) -> None:
        """Write a layout-free checkpoint into the directory `path`; collective."""
        checkpoint.save(path, self._module, self._trainer, self._mesh)

    def load(self, path: Path) -> None:
        """Read a checkpoint written on any layout; collective."""
        checkpoint.load(path, self._module, self._trainer, self._mesh)
