"""SmolLM2-135M-Instruct's published weights: log-probs and one whole update on each kind of layout equal transformers'."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from fivefold.columns import Column
from fivefold.config.learners import OptimizerConfig, PolicyConfig
from tests.support.shards import shard_of_replica
from tests.support.tiny_models import load_tensors
from tests.support.two_steps import LENGTHS, OBJECTIVE, reference_step, whole_batch

pytestmark = pytest.mark.published

TEXT = """What is the capital of France, and which river flows through it? The capital of France is Paris. The river Seine flows
through it from the east to the west, and the old town lies on an island. If a train leaves at 9:40 and needs 125 minutes, it
arrives at 11:45, since two hours and five minutes have passed. Water boils at a lower temperature on a high mountain because the
pressure of the air is lower there, so potatoes have to be cooked for a longer time than at the sea."""
OPTIMIZER = OptimizerConfig(lr=1e-4, eps=1e-4, weight_decay=0.1, clip_grad=1.0, betas=[0.8, 0.95])
"""With eps near the elements of the clipped gradient a wrong scale of the gradient changes the update."""
POLICY = PolicyConfig(dtype="float32", tokens_per_micro_batch=1000, optimizer=OPTIMIZER)
BOUNDS = {"log-prob": 5e-5, "loss": 8e-5, "gradient norm": 5e-5, "parameter": 2e-6}
"""What float32 may move in any order of summation.

Logits are near 30, where a last place is 2e-6, and 30 layers add up some ten of them: a log-prob differs from transformers' by 2e-5.
The loss has a slope of about 1 in them and is near 0.3. A token's slope moves by as much as its log-prob, so the gradient moves by
that share of itself. Adam moves a parameter by lr / eps = 1 times the error of an element of the clipped gradient, if the element
is small. Its terms are as large as the largest element, 0.13, of which 2e-6 is 250 roundings; 1.01e-6 was seen.
"""
LAYOUTS = ("d1", "d2", "t3", "p2", "c2")


class Oracle(NamedTuple):
    """The update by transformers and torch.optim.AdamW in one process."""

    text_T: torch.Tensor
    logprobs_T: torch.Tensor
    loss: float
    grad_norm: float
    weights: Path
    """File with the updated weights."""


@pytest.fixture(scope="module")
def oracle(smollm2, tmp_path_factory) -> Oracle:
    import transformers
    from safetensors.torch import save_file

    text_T = torch.tensor(transformers.AutoTokenizer.from_pretrained(smollm2)(TEXT)["input_ids"][: sum(LENGTHS)])
    assert len(text_T) == sum(LENGTHS)
    [(loss, norm)], weights, logprobs_T = reference_step(
        smollm2, {}, batch=whole_batch(text_T), optimizer=OPTIMIZER, updates=1
    )
    directory = tmp_path_factory.mktemp("oracle")
    save_file(weights, directory / "model.safetensors")
    return Oracle(text_T, logprobs_T, loss, norm, directory)


def updated(mesh, directory: Path, policy: PolicyConfig, oracle: Oracle, fault: str = "") -> dict[str, float]:
    """How far a rank's log-probs, loss, gradient norm and updated weights are from the oracle's; how far these have moved."""
    from fivefold.megatron import step
    from fivefold.megatron.model import MegatronModel

    if fault:
        original = step.finalize_model_grads

        def twice(model, num_tokens, **kwargs):
            original(model, num_tokens, **kwargs)
            for chunk in model:
                chunk.scale_gradients(2.0)

        step.finalize_model_grads = twice
    model = MegatronModel(directory, policy, mesh, total_updates=1)
    batch = whole_batch(oracle.text_T)
    base = {name: oracle.logprobs_T + batch[name] for name in (Column.OLD_LOGPROBS, Column.REF_LOGPROBS)}
    replica = shard_of_replica(mesh.ranks, range(len(LENGTHS)))
    mine = batch.with_columns(base).select(replica)
    expected = batch.with_columns({Column.OLD_LOGPROBS: oracle.logprobs_T}).select(replica)[Column.OLD_LOGPROBS]
    logprobs = (model.forward(mine) - expected)[mine.loss_mask_T]
    report = model.train_step(mine, OBJECTIVE.loss)
    before, after, names = load_tensors(directory), load_tensors(oracle.weights), set()
    distances = {"parameter": 0.0, "moved": 0.0}
    for name, tensor in model.weights():
        names.add(name)
        distances["parameter"] = max(distances["parameter"], float((tensor - after[name]).abs().max()))
        distances["moved"] = max(distances["moved"], float((after[name] - before[name].float()).abs().max()))
    assert names == set(after), names ^ set(after)
    return distances | {
        "log-prob": float(logprobs.abs().max()),
        "loss": abs(report.loss - oracle.loss) / abs(oracle.loss),
        "gradient norm": abs(report.grad_norm - oracle.grad_norm) / oracle.grad_norm,
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_update_of_published_weights_is_transformers_on_every_layout(cluster, smollm2, oracle, layout):
    for distances in cluster.run(updated, f"megatron:{layout}", smollm2, POLICY, oracle):
        print(layout, distances)
        assert distances["moved"] > 25 * BOUNDS["parameter"]
        assert {name: distances[name] for name, bound in BOUNDS.items() if not distances[name] <= bound} == {}


def test_micro_batches_of_published_weights_do_not_change_the_update(cluster, smollm2, oracle):
    for distances in cluster.run(updated, "megatron:d2", smollm2, replace(POLICY, tokens_per_micro_batch=32), oracle):
        assert {name: distances[name] for name, bound in BOUNDS.items() if not distances[name] <= bound} == {}


def test_a_gradient_of_the_wrong_scale_is_seen_with_published_weights(cluster, smollm2, oracle):
    (distances,) = cluster.run(updated, "megatron:d1", smollm2, POLICY, oracle, "twice")
    assert distances["gradient norm"] > 0.5
