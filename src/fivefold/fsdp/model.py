"""FSDPModel: the Model surface on the models of transformers, sharded by FSDP2."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from fivefold.backend.copies import differences, raise_together
from fivefold.backend.loss_scale import LossScale
from fivefold.backend.micro_batches import BatchingConfig
from fivefold.backend.offload import Offload
from fivefold.backend.shares import HostCopies
from fivefold.config.learners import PolicyConfig
from fivefold.config.mcore_options import LOSS_SCALE
from fivefold.distributed.objects import all_gather_json
from fivefold.errors import UserError, first_line, sentence_of
from fivefold.fsdp import checkpoint, step
from fivefold.fsdp.files import read_weights, zero_
from fivefold.fsdp.mesh import Mesh
from fivefold.fsdp.out_of_memory import naming_what_is_full
from fivefold.fsdp.packed_model import build
from fivefold.fsdp.parameters import local_tensors
from fivefold.fsdp.rotary import depends_on_length
from fivefold.fsdp.self_check import check_packing
from fivefold.fsdp.stream import checked, stream_weights
from fivefold.fsdp.updater import Updater
from fivefold.fsdp.used import UsedParameters
from fivefold.models.families import load_spec, parameters_of
from fivefold.types import LossFn, StepReport, TokenBatch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class FSDPModel:
    """A language model, or one with a value head, sharded over a mesh; it trains if `total_updates` is given."""

    has_mtp = False

    def __init__(
        self,
        directory: Path,
        policy: PolicyConfig,
        mesh: Mesh,
        *,
        total_updates: int | None = None,
        updates_per_step: int = 1,
        read_weights: bool = True,
        value_head: bool = False,
        torch_dist: Path | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """Load the Hugging Face model in `directory`.

        `total_updates` is the length of the schedule, and `updates_per_step` of them make a step; without `total_updates`
        the model only computes. With `value_head` the model ends in a value head, which starts at 0 if the directory has
        none (`score.weight`). With `read_weights=False` the weights stay 0 until a checkpoint sets them.
        """
        if torch_dist is not None:
            raise UserError(f"fsdp reads Hugging Face directories: got the Megatron-Core checkpoint {torch_dist}")
        self._mesh, self._policy = mesh, policy
        self._model, splits = build(
            directory, mesh, DTYPES[policy.dtype], policy, value_head=value_head, trust_remote_code=trust_remote_code
        )
        self.spec = load_spec(directory, value_head)
        stored = [name for parameter in parameters_of(self.spec) for name in parameter.hf]
        self._tensors = local_tensors(self._model, splits, mesh, stored)
        self.value_head_is_new = False
        """The value head was initialized to 0, because the directory has none."""
        if read_weights:
            unread = self._model.model._keys_to_ignore_on_load_unexpected or ()
            self.value_head_is_new = self._together(lambda: _read(directory, self, unread))
        else:
            zero_(self._tensors)
        self._batching = BatchingConfig(
            mesh.ranks,
            mesh.device,
            policy.tokens_per_micro_batch,
            self._model.vocab,
            value_head,
            # The lengths of two responses may rotate their prompt differently.
            share_prefix=policy.shares_prefix_on(mesh.layout) and not depends_on_length(self._model),
            sequences=policy.sequences_per_forward,
        )
        self._updater: Updater | None = None
        if total_updates is None:
            self._model.requires_grad_(False)
        else:
            scale = None
            if policy.dtype == "float16":
                scale = LossScale(
                    LOSS_SCALE["initial_loss_scale"],
                    LOSS_SCALE["min_loss_scale"],
                    int(LOSS_SCALE["loss_scale_window"]),
                    int(LOSS_SCALE["hysteresis"]),
                    mesh.device,
                )
            is_fused = mesh.device.type == "cuda" or policy.fsdp.cpu_adam
            self._updater = Updater(self._tensors, policy.optimizer, total_updates, updates_per_step, scale, is_fused)
            self._used = UsedParameters(self._model, self._tensors, mesh)
        self._copies = HostCopies(mesh.device)
        later = (lambda: []) if self._updater is None or policy.fsdp.cpu_adam else self._updater.later_moments
        self._offload = Offload(policy.offload, mesh.device, self._offloaded, later)
        if read_weights:
            check_packing(self._model, self._batching, mesh)

    @property
    def version(self) -> int:
        """Number of optimizer steps taken."""
        return 0 if self._updater is None else self._updater.schedule.num_steps

    def modules(self) -> Iterator[torch.nn.Module]:
        """All modules of the model."""
        return self._model.modules()

    def forward(self, batch: TokenBatch) -> Tensor:
        """[T] log-probs of the response tokens, or values, on the host of every rank of the replica."""
        self._offload.onload("parameters")
        with naming_what_is_full(self._mesh.device):
            return step.forward_only(self._model, batch, self._batching, self._mesh)

    def train_step(self, batch: TokenBatch, loss_fn: LossFn) -> StepReport:
        """Take one optimizer step over the whole batch; all ranks skip it if loss or gradients are not finite."""
        with naming_what_is_full(self._mesh.device):
            return self._train_step(batch, loss_fn)

    def _train_step(self, batch: TokenBatch, loss_fn: LossFn) -> StepReport:
        updater, mesh = self._updater, self._mesh
        assert updater is not None, "a model built without total_updates does not train"
        self.onload()
        self._model.zero_grad(set_to_none=True)
        self._used.begin()
        scale = 1.0 if updater.loss_scale is None else float(updater.loss_scale.scale)
        totals = step.forward_backward(
            self._model, batch, loss_fn, self._batching, mesh, self._policy.fsdp.keep_gathered, scale
        )
        self._used.finish()
        gradients = step.finish_gradients(self._tensors, mesh)
        if scale != 1.0:
            torch._foreach_mul_([grad for _, grad in gradients], 1.0 / scale)
        grad_norm = step.gradient_norm(gradients, mesh)
        assert totals.totals is not None
        loss, metrics = totals.totals.reduce(mesh.ranks.dp)
        skipped = not (math.isfinite(loss) and math.isfinite(grad_norm))
        lr, loss_scale, overflowed = 0.0, None, False
        if updater.loss_scale is not None:
            loss_scale = scale
            overflowed = skipped and math.isfinite(loss) and updater.loss_scale.can_fall
            updater.loss_scale.follow(skipped)
        if not skipped:
            lr = updater.step(gradients, grad_norm)
        self._model.zero_grad(set_to_none=True)
        return StepReport(
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            metrics=metrics,
            micro_batches=totals.micro_batches,
            tokens=totals.tokens,
            sequences=totals.sequences,
            skipped=skipped,
            loss_scale=loss_scale,
            overflowed=overflowed,
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) on every rank, layer by layer; collective."""
        self._offload.onload("parameters")
        return checked(stream_weights(self._model, self._tensors, self._mesh), self._tensors)

    def verify(self) -> None:
        """Compare copies that must be equal on several ranks; raises RuntimeError naming parameter and ranks. Collective."""
        self._offload.onload("parameters")
        comparisons = [
            ("replicas", self._mesh.copies, {tensor.name for tensor in self._tensors}),
            ("tensor-parallel duplicates", self._mesh.tp, {tensor.name for tensor in self._tensors if not tensor.is_apart}),
            ("buffers", self._mesh.shard, {tensor.name for tensor in self._tensors if not tensor.is_sharded}),
        ]
        named = {tensor.name: tensor.values for tensor in self._tensors}
        raise_together(differences(named, comparisons, self._mesh.device), self._mesh.ranks.members)

    def offload(self, parameters: bool = True) -> dict[str, int]:
        """Move to the host what `policy.offload` names; return the bytes that left the device by part.

        With `parameters=False` the parameters stay on the device.
        """
        return self._offload.offload(self._offload.leaving(parameters))

    def prepare_offload(self) -> None:
        """Allocate the host memory for the next offload in background threads, with that of moments to come."""
        self._offload.prepare()

    def onload(self) -> None:
        """Move offloaded state back to the device; every method that needs the state calls this itself."""
        self._offload.onload()

    def save(self, path: Path) -> None:
        """Write a layout-independent checkpoint into the directory `path`; collective."""
        self.snapshot(copies=False)(path)

    def prepare_snapshots(self) -> None:
        """Allocate the memory for snapshot copies in a background thread. Collective."""
        self.onload()
        self._copies.prepare(checkpoint.share_of(self._tensors, self._updater, self._mesh))

    def snapshot(self, copies: bool) -> Callable[[Path], list[Path]]:
        """Return a function that writes this rank's share of a layout-independent checkpoint and returns its files.

        The function is passed the directory. With `copies` the share is copied to the host first, so that a thread may write
        it while the model continues. Collective.
        """
        self.onload()
        share = checkpoint.share_of(self._tensors, self._updater, self._mesh)
        return (self._copies.of(share) if copies else share).write

    def load(self, path: Path) -> None:
        """Read a checkpoint written on any layout; collective."""
        # It brings moments, which are offloaded before the first sampling. Reading takes longer than allocating.
        self._offload.prepare()
        self.onload()
        self._together(lambda: checkpoint.load(path, self.spec, self._tensors, self._updater))
        # Loading does not guarantee that copies are equal.
        self.verify()

    def _together(self, read: Callable[[], bool]) -> bool:
        """Call `read`, and raise its error on all ranks of the model if one of them fails. Collective."""
        result, fault, kind = False, "", UserError
        try:
            result = read()
        except checkpoint.DamagedFile as error:
            fault, kind = str(error), checkpoint.DamagedFile
        except (ValueError, OSError) as error:
            fault = sentence_of(error) or first_line(error)
        faults = all_gather_json([fault, kind is not UserError], self._mesh.ranks.members)
        for text, is_damage in faults:
            if text:
                raise checkpoint.DamagedFile(text) if is_damage else UserError(text)
        return result

    def _offloaded(self, part: str) -> list[Tensor]:
        if self._policy.fsdp.cpu_adam:
            return []
        if part == "parameters":
            return [tensor.values for tensor in self._tensors if tensor.is_sharded]
        if part == "optimizer" and self._updater is not None:
            return self._updater.state_tensors()
        # Gradients are freed at the end of every update.
        return []


def _read(directory: Path, model: FSDPModel, unread: tuple[str, ...]) -> bool:
    return read_weights(directory, model._tensors, unread)
