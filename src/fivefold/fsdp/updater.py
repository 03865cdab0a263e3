"""AdamW over this rank's shards, with schedule and loss scale."""

from __future__ import annotations

import torch
from torch import Tensor

from fivefold.backend.checkpoint_names import MOMENTS
from fivefold.backend.loss_scale import LossScale
from fivefold.backend.schedule import Schedule
from fivefold.config.learners import OptimizerConfig
from fivefold.fsdp.parameters import LocalTensor


class Updater:
    """Turns gradients into new weights. Moments are float32, and sharded as the parameters are."""

    def __init__(
        self,
        tensors: list[LocalTensor],
        settings: OptimizerConfig,
        total_updates: int,
        updates_per_step: int,
        loss_scale: LossScale | None,
        is_fused: bool,
    ) -> None:
        self._settings, self.loss_scale = settings, loss_scale
        # Plain tensors in the memory of the sharded ones: torch's fused kernels take these.
        self.shards = {tensor.name: torch.nn.Parameter(tensor.values) for tensor in tensors if tensor.is_sharded}
        # Biases of stacked experts have two dimensions.
        decays = {tensor.name: len(tensor.shape) > 1 and not tensor.name.endswith("bias") for tensor in tensors}
        decayed = [shard for name, shard in self.shards.items() if decays[name] and shard.numel()]
        others = [shard for name, shard in self.shards.items() if not decays[name] and shard.numel()]
        self.adam = torch.optim.AdamW(
            [{"params": decayed, "wd_mult": 1.0}, {"params": others, "wd_mult": 0.0}],
            lr=settings.lr,
            betas=(settings.betas[0], settings.betas[1]),
            eps=settings.eps,
            fused=is_fused,
        )
        self.schedule = Schedule(self.adam, settings, total_updates, updates_per_step)

    def step(self, gradients: list[tuple[LocalTensor, Tensor]], grad_norm: float) -> float:
        """Clip the gradients, which must be finite, and take the optimizer step; return its learning rate."""
        self.schedule.step(1)
        bound = self._settings.clip_grad
        if bound and grad_norm > bound:
            # The same factor as torch.nn.utils.clip_grad_norm_.
            torch._foreach_mul_([grad for _, grad in gradients], bound / (grad_norm + 1e-6))
        for tensor, grad in gradients:
            shard = self.shards[tensor.name]
            assert shard.data_ptr() == tensor.values.data_ptr(), f"{tensor.name} has moved in memory"
            shard.grad = grad
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        return max(float(group["lr"]) for group in self.adam.param_groups)

    @property
    def steps(self) -> float:
        """Number of updates that Adam has counted."""
        counted = {float(state["step"]) for state in self.adam.state.values() if "step" in state}
        assert len(counted) <= 1, f"parameters differ in their updates: {sorted(counted)}"
        return counted.pop() if counted else float(self.schedule.num_steps)

    def moments(self, name: str) -> dict[str, Tensor]:
        """Return the moments of a tensor, which are 0 before the first step."""
        shard = self.shards[name]
        if not shard.numel():
            return {kind: torch.zeros_like(shard) for kind in MOMENTS}
        state = self.adam.state[shard]
        if not state:
            on = shard.device if self.adam.param_groups[0]["fused"] else torch.device("cpu")
            state |= {"step": torch.zeros((), device=on), **{kind: torch.zeros_like(shard.data) for kind in MOMENTS}}
        return {kind: state[kind] for kind in MOMENTS}

    def set_steps(self, steps: float) -> None:
        for state in self.adam.state.values():
            state["step"].fill_(steps)

    def state_tensors(self) -> list[Tensor]:
        """Return the moments that exist; step counts stay where they are."""
        return [state[kind] for state in self.adam.state.values() for kind in MOMENTS if kind in state]

    def later_moments(self) -> list[Tensor]:
        """Return tensors without data, of the sizes of the moments that Adam has not created yet."""
        later = [shard for shard in self.shards.values() if shard.numel() and not self.adam.state.get(shard)]
        return [torch.empty_like(shard, device="meta") for shard in later for _ in MOMENTS]
