"""AdamW by one kernel continues where plain AdamW stopped, and back."""

from __future__ import annotations

import copy

import pytest
import torch

from fivefold.megatron.optim.adam import FusedAdamW, initial_state


def optimizer(kind: type[torch.optim.AdamW]) -> torch.optim.AdamW:
    torch.manual_seed(3)
    parameters = [torch.nn.Parameter(torch.randn(*shape)) for shape in ((7, 5), (11,), (2, 3, 4))]
    made = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    if kind is FusedAdamW:
        # What `take_over` does with parameters on a GPU.
        made.__class__ = FusedAdamW
        made._choose()
    return made


def steps(made: torch.optim.AdamW, first: int, count: int) -> list[torch.Tensor]:
    parameters = made.param_groups[0]["params"]
    for number in range(first, first + count):
        torch.manual_seed(number)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        made.step()
    return [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize("after", [torch.optim.AdamW, FusedAdamW])
@pytest.mark.parametrize("before", [torch.optim.AdamW, FusedAdamW])
def test_a_checkpoint_of_either_continues_with_the_other(before, after):
    """Within two roundings of numbers of size 1 in six steps; a step that were counted again would be off by 1e-3."""
    wanted = steps(optimizer(torch.optim.AdamW), 0, 6)
    written = optimizer(before)
    values = steps(written, 0, 3)
    resumed = optimizer(after)
    for parameter, value in zip(resumed.param_groups[0]["params"], values, strict=True):
        parameter.data.copy_(value)
    resumed.load_state_dict(copy.deepcopy(written.state_dict()))
    assert resumed.param_groups[0]["fused"] is (True if after is FusedAdamW else written.param_groups[0]["fused"])
    for weights, oracle in zip(steps(resumed, 3, 3), wanted, strict=True):
        torch.testing.assert_close(weights, oracle, rtol=0, atol=1e-6)


def test_steps_that_a_checkpoint_counts_as_numbers_are_counted_on_the_device():
    """Megatron-Core's checkpoint counts steps once for all parameters, as an integer."""
    written = optimizer(torch.optim.AdamW)
    steps(written, 0, 3)
    state = copy.deepcopy(written.state_dict())
    for of_parameter in state["state"].values():
        of_parameter["step"] = int(of_parameter["step"])
    resumed = optimizer(FusedAdamW)
    resumed.load_state_dict(state)
    counted = [entry["step"] for entry in resumed.state.values()]
    assert len(counted) == 3
    assert all(torch.is_tensor(step) and step.dtype == torch.float32 and float(step) == 3 for step in counted)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, FusedAdamW])
def test_the_state_into_which_a_checkpoint_is_read_counts_where_the_kernel_counts(kind):
    """The fused kernel refuses a count on another device; any other Adam would wait for the GPU to read its own."""
    made = optimizer(kind)
    parameter = torch.nn.Parameter(torch.empty(3, device="meta"))
    state = initial_state(made, parameter)
    assert state["step"].device.type == ("meta" if kind is FusedAdamW else "cpu")
    assert state["exp_avg"].device == state["exp_avg_sq"].device == parameter.device
