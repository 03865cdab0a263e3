"""Multi-token prediction that is trained: two steps, the same on every layout as written out in plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from fivefold.config.learners import MegatronConfig, MTPConfig, PolicyConfig
from tests.support.cluster import Together
from tests.support.layout_cases import VPP2, Case
from tests.support.mtp_oracle import main_loss, mtp_steps
from tests.support.shards import shard_of_replica
from tests.support.two_steps import BOUNDS, LENGTHS, POLICY, whole_batch

JOINT = MTPConfig(train=True, loss_scaling_factor=0.7)
DETACHED = MTPConfig(train=True, loss_scaling_factor=0.7, detach_encoder=True)
ALONE = ("d1", "d2", "t2", "p2", "c2")
CASES = [
    *(("mimo", Case(layout), JOINT, budget) for layout in ALONE for budget in (1000, 32)),
    *(("mimo", Case(layout), DETACHED, 32) for layout in ("d1", "t2", "p2", "c2")),
    *(("mimo", case, JOINT, 32) for case in (Case("t2", sequence_parallel=False), Case("t2p2c2"), Case("p2", VPP2))),
    *(("mimo_two", Case(layout), JOINT, 32) for layout in ("d1", "p2", "t2c2")),
    *(("deepseek_v3_mtp", Case(layout), JOINT, 32) for layout in ("d1", "d2e2", "t2e2", "c2e2", "d2p2e2")),
    ("deepseek_v3_mtp", Case("d2e2"), DETACHED, 32),
    *(("glm4_moe_mtp", Case(layout), JOINT, 32) for layout in ("d1", "t2p2e2")),
]


def policy_of(case: Case, mtp: MTPConfig, budget: int, **settings_of_case) -> PolicyConfig:
    megatron = settings_of_case.pop("megatron", MegatronConfig(pipeline=case.pipeline))
    settings = replace(POLICY, tokens_per_micro_batch=budget, sequence_parallel=case.sequence_parallel)
    return replace(settings, megatron=megatron, mtp=mtp, **settings_of_case)


def two_steps(mesh, directory: Path, policy: PolicyConfig, saved: Path | None = None, taken: int = 0):
    """(reports, parameters by the names of the files) of one rank; with `saved` the first step is written there, or was."""
    from fivefold.megatron.model import MegatronModel

    model = MegatronModel(directory, policy, mesh, total_updates=2, read_weights=not taken)
    mine = whole_batch().select(shard_of_replica(mesh.ranks, range(len(LENGTHS))))
    if saved is not None and taken:
        model.load(saved)
    reports = [model.train_step(mine, main_loss) for _ in range(1 if saved is not None else 2)]
    if saved is not None and not taken:
        model.save(saved)
    model.verify()
    weights = dict(model.weights()) | dict(model.mtp_weights())
    return reports, {name: tensor.clone() for name, tensor in weights.items()}


@cache
def oracle(directory: Path, name: str, mtp: MTPConfig):
    return mtp_steps(directory, name, mtp)


def difference(results, expected) -> tuple[float, float, float]:
    """Largest (relative loss, relative gradient norm, absolute parameter) difference over ranks, steps and both losses."""
    numbers, state = expected
    losses, norms, parameters = [], [], []
    for reports, weights in results:
        assert set(weights) == {name for name in state if "shared_head.head" not in name}
        for report, (main, ahead, norm) in zip(reports, numbers, strict=True):
            losses += [abs(report.loss - main) / main, abs(report.metrics["policy/mtp_loss"] - ahead) / ahead]
            norms.append(abs(report.grad_norm - norm) / norm)
        parameters += [float((tensor - state[name]).abs().max()) for name, tensor in weights.items()]
    return max(losses), max(norms), max(parameters)


def assert_equal(results, expected) -> None:
    for size, bound in zip(difference(results, expected), BOUNDS, strict=True):
        assert size <= bound


@pytest.fixture(scope="module")
def steps(cluster, models):
    def call(name: str, case: Case, mtp: MTPConfig, budget: int):
        return f"megatron:{case.layout}", two_steps, models(name), policy_of(case, mtp, budget)

    return Together(
        cluster, {(name, str(case), mtp, budget): call(name, case, mtp, budget) for name, case, mtp, budget in CASES}
    )


@pytest.mark.parametrize(("name", "case", "mtp", "budget"), CASES, ids=str)
def test_a_step_with_multi_token_prediction_is_the_same_on_every_layout(steps, models, name, case, mtp, budget):
    assert_equal(steps[name, str(case), mtp, budget], oracle(models(name), name, mtp))


@pytest.mark.parametrize("mtp", [JOINT, DETACHED], ids=["joint", "detached"])
@pytest.mark.parametrize(("name", "layout"), [("mimo", "t2"), ("mimo", "p2"), ("deepseek_v3_mtp", "d2e2")])
def test_recomputed_layers_and_gradients_reduced_as_they_come_change_nothing(cluster, models, name, layout, mtp):
    """A detached layer that is recomputed would learn nothing if no input of it wanted a gradient, and the copy of the
    embedding on the last stage would never be ready to be reduced."""
    policy = policy_of(Case(layout), mtp, 32, recompute="full", megatron=MegatronConfig(ddp={"overlap_grad_reduce": True}))
    results = cluster.run(two_steps, f"megatron:{layout}", models(name), policy)
    assert_equal(results, oracle(models(name), name, mtp))


@pytest.mark.parametrize(("name", "first", "second"), [("mimo", "t2p2", "c2"), ("deepseek_v3_mtp", "d2e2", "p2")])
def test_a_checkpoint_has_the_layers_and_their_moments_on_any_layout(cluster, models, tmp_path, name, first, second):
    first_results = cluster.run(
        two_steps, f"megatron:{first}", models(name), policy_of(Case(first), JOINT, 32), _made(tmp_path)
    )
    then = cluster.run(two_steps, f"megatron:{second}", models(name), policy_of(Case(second), JOINT, 32), tmp_path / "c", 1)
    reports = [first_results[0][0][0]]
    assert_equal([(reports + reports_after, weights) for reports_after, weights in then], oracle(models(name), name, JOINT))


def _made(directory: Path) -> Path:
    (directory / "c").mkdir()
    return directory / "c"


def nothing_ahead(mesh, directory: Path, policy: PolicyConfig):
    from fivefold.megatron.model import MegatronModel

    model = MegatronModel(directory, policy, mesh, total_updates=2)
    # One prompt token and one response token.
    return model.train_step(whole_batch().select([5]), main_loss)


def test_an_update_without_a_further_token_has_no_loss_of_it(cluster, models):
    (report,) = cluster.run(nothing_ahead, "megatron:d1", models("mimo"), policy_of(Case("d1"), JOINT, 32))
    assert report.metrics["policy/mtp_loss"] == 0 and not report.skipped


@pytest.mark.parametrize(
    ("name", "layout", "says"),
    [
        ("qwen3", "d1", "num_nextn_predict_layers in config.json of this qwen3 model is 0 or missing"),
        ("tied", "p2", "needs p1"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_read(models, name, layout, says):
    from fivefold.layout import ParallelLayout
    from fivefold.models.families import load_spec

    spec = replace(load_spec(models("mimo")), tied=True) if name == "tied" else load_spec(models(name))
    with pytest.raises(ValueError, match=says):
        spec.check_mtp(ParallelLayout.parse(f"megatron:{layout}"))


# --- injected faults: each must be seen by the comparison above -------------------------------------------------------


def labels_one_too_few(mesh, *arguments):
    """Layers trained to predict the token that they are given."""
    from fivefold.backend import micro_batches

    original = micro_batches.MicroBatches._make

    def make(self, number):
        micro = original(self, number)
        ahead = tuple(replace(layer, targets_S=layer.token_ids_T[layer.source_index_S]) for layer in micro.ahead)
        return replace(micro, ahead=ahead)

    micro_batches.MicroBatches._make = make
    return two_steps(mesh, *arguments)


def embedding_of_the_same_token(mesh, *arguments):
    from fivefold.backend import micro_batches

    original = micro_batches.tokens_ahead
    micro_batches.tokens_ahead = lambda batch, steps: original(batch, steps - 1)
    return two_steps(mesh, *arguments)


def prompts_counted(mesh, *arguments):
    from fivefold.megatron import step

    original = step.targets_ahead
    step.targets_ahead = lambda batch, depth: original(replace(batch, loss_mask_T=torch.ones_like(batch.loss_mask_T)), depth)
    return two_steps(mesh, *arguments)


def samples_leak(mesh, *arguments):
    """The first tokens of a response predicted from the sample before."""
    from fivefold.megatron import step

    def targets(batch, depth):
        positions = batch.loss_mask_T.nonzero()[:, 0]
        return positions[positions >= 2 + depth]

    step.targets_ahead = targets
    return two_steps(mesh, *arguments)


def counted_by_replica(mesh, *arguments):
    """Means over each replica's own tokens."""
    from fivefold.megatron import step

    original = step.dist.all_reduce

    def reduce(tensor, *given, **kwargs):
        tail = tensor[3:].clone() if tensor.dtype == torch.long and tensor.ndim == 1 and len(tensor) > 3 else None
        result = original(tensor, *given, **kwargs)
        if tail is not None:
            tensor[3:] = tail
        return result

    step.dist.all_reduce = reduce
    return two_steps(mesh, *arguments)


def not_detached(mesh, *arguments):
    from fivefold.megatron.layers.mtp import DetachedPredictionLayer, PredictionLayer

    DetachedPredictionLayer._get_embeddings = PredictionLayer._get_embeddings
    return two_steps(mesh, *arguments)


def detached_too_much(mesh, *arguments):
    """The output layer learns nothing from further tokens."""
    from fivefold.megatron.layers.lm_head import LogProbHead

    original = LogProbHead.forward

    def forward(self, hidden, weight, source, targets, vocab, temperature):
        return original(
            self, hidden, self.weight.detach() if temperature == 1.0 else weight, source, targets, vocab, temperature
        )

    LogProbHead.forward = forward
    return two_steps(mesh, *arguments)


def embeddings_apart(mesh, *arguments):
    """The last stage's copy of the embedding learns by itself."""
    import sys

    module = sys.modules["megatron.core.distributed.finalize_model_grads"]
    module._allreduce_word_embedding_grads = lambda *args, **kwargs: None
    from fivefold.megatron.model import MegatronModel

    MegatronModel.verify = lambda self: None
    return two_steps(mesh, *arguments)


def temperature_kept(mesh, *arguments):
    from fivefold.megatron.layers.lm_head import LogProbHead
    from tests.support.two_steps import TEMPERATURE

    original = LogProbHead.forward
    LogProbHead.forward = lambda self, *given: original(self, *given[:-1], TEMPERATURE)
    return two_steps(mesh, *arguments)


def halves_swapped(mesh, *arguments):
    from fivefold.megatron.bridge.sharding import SHARDERS, ColumnParallel
    from fivefold.models.parameters import Sharding

    SHARDERS[Sharding.COLUMN_SWAPPED] = ColumnParallel()
    return two_steps(mesh, *arguments)


FAULTS = [
    (labels_one_too_few, "d1", JOINT),
    (embedding_of_the_same_token, "d1", JOINT),
    (prompts_counted, "d1", JOINT),
    (samples_leak, "d1", JOINT),
    (counted_by_replica, "d2", JOINT),
    (not_detached, "d1", DETACHED),
    (detached_too_much, "d1", DETACHED),
    (embeddings_apart, "p2", JOINT),
    (temperature_kept, "d1", JOINT),
    (halves_swapped, "d1", JOINT),
]


@pytest.mark.parametrize(("fault", "layout", "mtp"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_an_injected_fault_is_seen(cluster, models, fault, layout, mtp):
    results = cluster.run(fault, f"megatron:{layout}", models("mimo"), policy_of(Case(layout), mtp, 1000))
    with pytest.raises(AssertionError):
        assert_equal(results, oracle(models("mimo"), "mimo", mtp))


def test_the_copy_of_the_embedding_that_went_astray_is_named(cluster, models):
    policy = policy_of(Case("p2"), JOINT, 1000)
    with pytest.raises(RuntimeError, match="embedding differs between the pipeline's ends"):
        cluster.run(astray, "megatron:p2", models("mimo"), policy)


def astray(mesh, directory: Path, policy: PolicyConfig) -> None:
    from fivefold.megatron.model import MegatronModel

    model = MegatronModel(directory, policy, mesh, total_updates=2)
    if mesh.is_last_stage:
        model._chunks[-1].embedding.word_embeddings.weight.data[0, 0] += 1
    model.verify()
