"""AdamW in plain PyTorch: by one kernel on a GPU, or with moments in bfloat16, which Megatron-Core calls precision-aware."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import megatron.core.optimizer
import torch
from megatron.core.optimizer import OptimizerConfig
from torch import Tensor


class FusedAdamW(torch.optim.AdamW):
    """torch's AdamW by its fused kernel, whatever a checkpoint says of the optimizer that wrote it."""

    @classmethod
    def take_over(cls, optimizer: Any) -> None:
        """Let a plain AdamW whose parameters are on a GPU go on as this one."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if type(optimizer) is torch.optim.AdamW and parameters and all(parameter.is_cuda for parameter in parameters):
            optimizer.__class__ = cls
            cast(FusedAdamW, optimizer)._choose()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state, steps counted on the device as the kernel wants them."""
        super().load_state_dict(state_dict)
        self._choose()
        for parameter, state in self.state.items():
            if "step" in state:
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=parameter.device)

    def _choose(self) -> None:
        for group in self.param_groups:
            group |= {"fused": True, "foreach": False}


class PrecisionAwareConfig(OptimizerConfig):
    """Megatron-Core's configuration without its demand for Transformer Engine."""

    def __post_init__(self) -> None:
        self.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        self.store_param_remainders = False


class PrecisionAwareAdam(torch.optim.AdamW):
    """AdamW (Loshchilov & Hutter, alg. 2) computed in float32; moments are stored in dtypes of their own.

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
        """Zero moments, the parameter's own value as float32 copy."""
        self.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter, dtype=self._dtypes["exp_avg"]),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=self._dtypes["exp_avg_sq"]),
            "master_param": parameter.detach().float().clone(),
        }

    def get_unscaled_state(self, parameter: Tensor, name: str) -> Tensor:
        """One part of the state in float32."""
        value: Tensor = self.state[parameter][name]
        return value.float()

    def set_scaled_state(self, parameter: Tensor, name: str, value: Tensor) -> None:
        """Take one part of the state from float32."""
        self.state[parameter][name] = value.to(self._dtypes[name]).clone()
        if name == "master_param":
            parameter.data.copy_(value)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter with a gradient."""
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
        """torch's would turn the moments into the parameter's dtype; each keeps its own."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name, dtype in self._dtypes.items():
                if name in state:
                    state[name] = state[name].to(dtype)


@contextmanager
def precision_aware_adam(wanted: bool) -> Iterator[None]:
    """While Megatron-Core builds its optimizer, give it this one in the place of Transformer Engine's."""
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
