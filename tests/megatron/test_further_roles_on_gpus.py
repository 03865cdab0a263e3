"""Multi-token prediction, experts that are chosen again and a process reward model on GPUs, against the oracles of the CPU tests."""

from __future__ import annotations

import pytest

from tests.megatron import test_mtp, test_prm, test_router_replay
from tests.support.layout_cases import Case
from tests.support.two_steps import BOUNDS, ROUTER, difference, policy_of

pytestmark = pytest.mark.gpu


def assert_close(differences) -> None:
    """Float32 on both sides; a GPU's products have other orders of summation than a CPU's, by which bounds grow a little."""
    for number, bound in zip(differences, BOUNDS, strict=True):
        assert number <= 4 * bound


@pytest.mark.parametrize("mtp", [test_mtp.JOINT, test_mtp.DETACHED], ids=["joint", "detached"])
@pytest.mark.parametrize(("name", "layout"), [("mimo", "d1"), ("mimo", "t2"), ("mimo", "p2"), ("deepseek_v3_mtp", "d2e2")])
def test_a_step_with_multi_token_prediction_is_that_of_the_oracle(gpus, models, name, layout, mtp):
    policy = test_mtp.policy_of(Case(layout), mtp, 32)
    results = gpus.run(test_mtp.two_steps, f"megatron:{layout}", models(name), policy)
    assert_close(test_mtp.difference(results, test_mtp.oracle(models(name), name, mtp)))


@pytest.mark.parametrize("layout", ["d1", "d2e2", "p2"])
@pytest.mark.parametrize("name", test_router_replay.MODELS)
def test_replayed_routes_give_the_step_of_transformers(gpus, models, name, layout):
    expected = test_router_replay.oracle(models(name), name, ROUTER)
    policy, routes_TLK = policy_of(name, Case(layout), 32), test_router_replay.routes_of(name)
    results = gpus.run(test_router_replay.replayed_step, f"megatron:{layout}", models(name), policy, expected[2], routes_TLK)
    assert_close(difference(results, expected))


@pytest.mark.parametrize("case", [test_prm.Case("d1", "d1"), test_prm.Case("d2", "t2")], ids=str)
def test_a_process_reward_model_learns_as_in_the_oracle(gpus, models, tmp_path, case):
    directory, other = models("qwen3"), models("llama")
    numbers, whole_T, state, _ = test_prm.oracle(directory, other, tmp_path, case.update, case.loss)
    for reports, advantages_T, weights, _ in gpus.run(
        test_prm.learned, f"megatron:d{case.world_size}", case, directory, other
    ):
        for report, expected in zip(reports, numbers, strict=True):
            assert report == pytest.approx(expected, rel=4 * BOUNDS[1])
        assert float((advantages_T - whole_T).abs().max()) < 4 * test_prm.ADVANTAGE_BOUND
        assert set(weights) == set(state)
        assert all(float((tensor - state[name]).abs().max()) <= 4 * BOUNDS[2] for name, tensor in weights.items())
