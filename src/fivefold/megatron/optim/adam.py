"""AdamW in plain PyTorch: a fused kernel on GPUs, or moments in bfloat16, which Megatron-Core calls precision-aware."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import megatron.core.optimizer
import torch
from megatron.core.optimizer import OptimizerConfig
from torch import Tensor


class FusedAdamW(torch.optim.AdamW):
    """torch's AdamW with its fused kernel, whatever optimizer wrote the checkpoint that it loads."""

    @classmethod
    def take_over(cls, optimizer: Any) -> None:
        """Convert a plain AdamW whose parameters are on a GPU into this class."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if type(optimizer) is torch.optim.AdamW and parameters and all(parameter.is_cuda for parameter in parameters):
            optimizer.__class__ = cls
            cast(FusedAdamW, optimizer)._choose()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state, with step counts on the device as the kernel requires."""
        super().load_state_dict(state_dict)
        self._choose()
        for parameter, state in self.state.items():
            if "step" in state:
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=parameter.device)

    def _choose(self) -> None:
        for group in self.param_groups:
            group |= {"fused": True, "foreach": False}


class PrecisionAwareConfig(OptimizerConfig):
    """Megatron-Core's optimizer configuration without its requirement of Transformer Engine."""

    def __post_init__(self) -> None:
        self.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        self.store_param_remainders = False


class PrecisionAwareAdam(torch.optim.AdamW):
    """AdamW (Loshchilov & Hutter, alg. 2) computed in float32; moments are stored in separate dtypes.

    It holds the float32 copy of each parameter itself (`master_param`) and reads gradients from `decoupled_grad`, as
    Megatron-Core expects.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        exp_avg_dtype: torch.dtype,
        exp_avg_sq_dtype: torch.dtype,
        **unused: Any,
    ) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps)
        self._dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, "master_param": torch.float32}

    def initialize_state(self, parameter: Tensor) -> None:
        """Set the state before the first step. Megatron-Core calls this."""
        self.state[parameter] = self.initial_state(parameter)

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return zero moments, and the parameter's own value as its float32 copy."""
        return {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter, dtype=self._dtypes["exp_avg"]),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=self._dtypes["exp_avg_sq"]),
            "master_param": parameter.detach().float().clone(),
        }

    def get_unscaled_state(self, parameter: Tensor, name: str) -> Tensor:
        """Return one part of the state in float32."""
        value: Tensor = self.state[parameter][name]
        return value.float()

    def set_scaled_state(self, parameter: Tensor, name: str, value: Tensor) -> None:
        """Store one part of the state, given in float32, in its own dtype."""
        self.state[parameter][name] = value.to(self._dtypes[name]).clone()
        if name == "master_param":
            parameter.data.copy_(value)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                gradient = getattr(parameter, "decoupled_grad", None)
                if gradient is None:
                    continue
                if not self.state[parameter]:
                    self.initialize_state(parameter)
                state = self.state[parameter]
                state["step"] += 1
                count = float(state["step"])
                gradient, master = gradient.float(), state["master_param"]
                mean = state["exp_avg"].float().lerp_(gradient, 1 - beta1)
                square = state["exp_avg_sq"].float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                state["exp_avg"].copy_(mean)
                state["exp_avg_sq"].copy_(square)
                master.mul_(1 - group["lr"] * group["weight_decay"])
                # Not in place: in float32 `square` is the state itself.
                denominator = square.sqrt().div_((1 - beta2**count) ** 0.5).add_(group["eps"])
                master.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1**count))
                parameter.copy_(master)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state with each part in its own dtype: torch would convert moments to the parameter's dtype."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name, dtype in self._dtypes.items():
                if name in state:
                    state[name] = state[name].to(dtype)


@contextmanager
def precision_aware_adam(wanted: bool) -> Iterator[None]:
    """Replace Transformer Engine's Adam with this one while Megatron-Core builds its optimizer, if `wanted`."""
    if not wanted:
        yield
        return
    module: Any = megatron.core.optimizer
    names = ("USING_PYTORCH_OPTIMIZER", "Adam", "is_te_min_version")
    before = [getattr(module, name) for name in names]
    for name, value in zip(names, (False, PrecisionAwareAdam, lambda *version: False), strict=True):
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(module, name, value)


def initial_state(adam: Any, parameter: Tensor) -> dict[str, Tensor]:
    """Return the state of a parameter before the first step of an Adam; torch creates it only in that step."""
    if isinstance(adam, PrecisionAwareAdam):
        return adam.initial_state(parameter)
    # The fused kernel reads the count where the parameter is.
    counts_on = parameter.device if adam.param_groups[0].get("fused") else torch.device("cpu")
    moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), device=counts_on), **moments}
