"""The gradient of every surrogate, ratio and aggregation: the same for every cut into micro-batches and ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch

from fivefold.algo import methods
from fivefold.algo.aggregate import LEGACY_AGGREGATE
from fivefold.algo.objective import Objective, make_objective
from fivefold.columns import Column
from fivefold.config.learners import MegatronConfig, PolicyConfig
from fivefold.distributed.balance import balance, plan_micro_batches
from tests.support import loops
from tests.support.cluster import Together
from tests.support.objectives import COMBINATIONS, WITHOUT_RATIO, as_lists
from tests.support.shards import shard_of_replica
from tests.support.two_steps import LENGTHS, MAX_RESPONSE, POLICY, PROMPTS, whole_batch

CUTTABLE = [combination for combination in COMBINATIONS if LEGACY_AGGREGATE not in combination]
CUTS = [("d1", 2), ("d2", 5), ("p2", 5), ("c2", 1)]
"""Layout and micro-batches of each replica."""
MORE_CUTS = [pair for pair in product(("d1", "d2", "t2", "p2", "c2"), (1, 2, 5)) if pair not in [("d1", 1), *CUTS]]
"""`make test-slow` has them."""
RESPONSES = torch.tensor(LENGTHS) - torch.tensor(PROMPTS)


@cache
def choices() -> list:
    """Every combination, with KL, entropy and a sequence-level correction; and DPO."""
    extra = {"kl": methods.KL(estimator="k3+", coef=0.1), "entropy_coef": 0.05}
    extra["rollout_correction"] = methods.Correction(
        name="sequence_tis", reject="geometric", reject_low=0.8, reject_high=1.25
    )
    settings = []
    for surrogate, ratio, aggregate in CUTTABLE:
        level = {} if surrogate in WITHOUT_RATIO else {"importance_sampling_level": ratio}
        settings.append(("cispo", methods.Choices(surrogate=surrogate, aggregate=aggregate, **level, **extra)))
    settings.append(("dpo", methods.Choices(beta=0.5)))
    return [methods.resolve(name, given) for name, given in settings]


def objectives() -> list[Objective]:
    return [Objective.of(chosen) for chosen in choices()]


def batch_for(objective, base_T: torch.Tensor):
    """The batch of the step's tests, on which the old, the reference's and the engine's log-probs differ from the policy's."""
    batch = whole_batch()
    noise = torch.randn(3, sum(LENGTHS), generator=torch.Generator().manual_seed(9)) * torch.tensor([[0.3], [0.3], [0.1]])
    mask = batch.loss_mask_T
    return replace(
        batch.with_columns(
            {
                Column.LOSS_WEIGHTS: batch.expand_to_tokens(objective.loss_weights(RESPONSES, MAX_RESPONSE)),
                Column.OLD_LOGPROBS: base_T + noise[0] * mask,
                Column.REF_LOGPROBS: base_T + noise[1] * mask,
                Column.ROLLOUT_LOGPROBS: base_T + (noise[0] + noise[2]) * mask,
                Column.SELECTED: mask & (torch.arange(len(mask)) % 3 == 0),
            }
        ),
        per_micro_batch=objective.aggregation.per_micro_batch,
        samples_per_comparison=2 if objective.gradient.surrogate.ratio_reference == "reference" else 1,
    )


def gradients(mesh, directory: Path, policy: PolicyConfig, count: int):
    """([objectives, parameters] gradients, losses) on rank 0: what a step leaves before the optimizer."""
    from fivefold.backend import micro_batches as planning
    from fivefold.megatron import step
    from fivefold.megatron.bridge import WeightStream
    from fivefold.megatron.chunks import named_weights
    from fivefold.megatron.model import MegatronModel

    model = MegatronModel(directory, policy, mesh, total_updates=1)
    mine = shard_of_replica(mesh.ranks, range(len(LENGTHS) // 2))
    mine = [sample for pair in mine for sample in (2 * pair, 2 * pair + 1)]
    base_T = torch.zeros(sum(LENGTHS))
    index = whole_batch().token_index(mine)
    base_T[index] = model.forward(whole_batch().select(mine))
    torch.distributed.all_reduce(base_T, group=mesh.ranks.dp)
    stream = WeightStream(
        lambda: {name: tensor.main_grad for name, tensor in named_weights(model._chunks).items()}, model.spec, mesh, 64
    )
    planning.micro_batches_needed = lambda sizes, budget: count
    planning.plan_micro_batches = lambda sizes, count, budget: balance(sizes, count)
    rows, losses = [], []
    for objective in objectives():
        for ddp in model._models:
            ddp.train()
            ddp.zero_grad_buffer()
        part = batch_for(objective, base_T).select(mine)
        with mesh.active():
            sums = step.forward_backward(model._models, model._finalize, part, objective.loss, model._batching, [])
        row = torch.cat([tensor.flatten() for _, tensor in sorted(stream())])
        rows.append(row.clone() if mesh.ranks.rank == 0 else None)
        assert sums.micro_batches == count
        losses.append(step.loss_and_metrics(sums, mesh)[0])
    return (torch.stack(rows), losses) if mesh.ranks.rank == 0 else None


@pytest.fixture(scope="module")
def gradients_of(cluster, models):
    return results(cluster, models, CUTS)


@pytest.fixture(scope="module")
def more(cluster, models):
    return results(cluster, models, MORE_CUTS)


def results(cluster, models, cuts) -> Together:
    """Of all ranks by (layout, count), the uncut batch on one rank among them."""
    # With the distributed optimizer each replica would keep a part of the sums only.
    policy = replace(POLICY, megatron=MegatronConfig(ddp={"use_distributed_optimizer": False}))
    calls = {
        (layout, count): (f"megatron:{layout}", gradients, models("qwen3"), policy, count)
        for layout, count in [("d1", 1), *cuts]
    }
    return Together(cluster, calls)


@pytest.mark.parametrize(("layout", "count"), CUTS)
def test_every_objective_has_the_same_gradient_for_every_cut(gradients_of, layout, count):
    check_gradients(gradients_of, layout, count)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "count"), MORE_CUTS)
def test_every_objective_has_the_same_gradient_for_more_cuts(more, layout, count):
    check_gradients(more, layout, count)


def check_gradients(gradients_of: Together, layout: str, count: int) -> None:
    """Relative to each objective's gradient norm: sums in another order differ by float32's rounding and no more."""
    expected, gradient = gradients_of["d1", 1][0][0], gradients_of[layout, count][0][0]
    norms = expected.norm(dim=1)
    assert norms.min() > 1e-3
    # Different objectives have different gradients: the comparison is not of zeros or of one number.
    assert len({round(float(row.norm() / 1e-3)) for row in expected}) > len(COMBINATIONS) // 2
    # Sixteen roundings of float32: t2 is 8.4 of them away on some CPUs.
    # That of sppo is a multiple of the sum of a response's log-ratios, and carries the rounding of all of them.
    rounding = 16 * torch.finfo(torch.float32).eps
    bounds = torch.tensor([*(4 * rounding if name == "sppo" else rounding for name, *_ in CUTTABLE), rounding])
    assert bool(((gradient - expected).norm(dim=1) <= bounds * norms).all())


def test_every_objective_s_loss_on_megatron_core_equals_the_loop(gradients_of, models):
    """Log-probs and entropies by transformers, the loss by tests/support/loops.py."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(models("qwen3")).float()
    batch, logprobs, entropies, start = whole_batch(), [], [], 0
    with torch.no_grad():
        for length in LENGTHS:
            tokens = batch.token_ids_T[start : start + length]
            logp = torch.log_softmax(model(tokens[None]).logits[0] / batch.temperature, -1)[:-1]
            logprobs += [torch.zeros(1), logp.gather(1, tokens[1:, None])[:, 0]]
            entropies += [torch.zeros(1), -(logp.exp() * logp).sum(1)]
            start += length
    now, entropy = torch.cat(logprobs) * batch.loss_mask_T, torch.cat(entropies)
    losses = gradients_of["d2", 5][0][1]
    for chosen, objective, loss in zip(choices(), objectives(), losses, strict=True):
        expected = loops.loss(chosen, as_lists(batch_for(objective, now), now.double(), entropy), MAX_RESPONSE)
        assert loss == pytest.approx(float(expected), rel=2e-5, abs=1e-6), chosen
    assert len({round(loss, 4) for loss in losses}) > len(losses) // 2


def legacy_loss(mesh, directory: Path, policy: PolicyConfig, base_T: torch.Tensor):
    from fivefold.megatron.model import MegatronModel

    model = MegatronModel(directory, policy, mesh, total_updates=1)
    objective = make_objective("grpo", kl=methods.KL(coef=0.0), aggregate=LEGACY_AGGREGATE)
    mine = shard_of_replica(mesh.ranks, range(len(LENGTHS)))
    batch = batch_for(objective, base_T).select(mine)
    return model.train_step(batch, objective.loss).loss, mine


@pytest.mark.parametrize("layout", ["d1", "d2"])
def test_the_legacy_aggregation_is_the_mean_over_micro_batches_of_all_replicas(cluster, models, layout):
    budget = 60 if layout == "d1" else 32
    policy = replace(POLICY, tokens_per_micro_batch=budget)
    base_T = -torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(2)) * whole_batch().loss_mask_T
    results = cluster.run(legacy_loss, f"megatron:{layout}", models("qwen3"), policy, base_T)
    assert len({loss for loss, _ in results}) == 1
    # The same by hand, from the log-probs of one process.
    (logprobs,) = cluster.run(own_logprobs, "megatron:d1", models("qwen3"))
    batch = batch_for(make_objective("grpo"), base_T)
    means = []
    for _, mine in results:
        lengths = [LENGTHS[i] for i in mine]
        for samples in plan_micro_batches(lengths, 2, budget):
            index = batch.token_index([mine[i] for i in samples])
            index = index[batch.loss_mask_T[index]]
            ratio = (logprobs[index] - batch[Column.OLD_LOGPROBS][index]).exp()
            advantage = batch[Column.ADVANTAGES][index]
            means.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean().item())
    assert results[0][0] == pytest.approx(sum(means) / len(means), rel=1e-5)


def own_logprobs(mesh, directory: Path):
    from fivefold.megatron.model import MegatronModel

    return MegatronModel(directory, POLICY, mesh).forward(whole_batch())


FORWARDS = [None, 1, 3, 100]
"""policy.sequences_per_forward."""
PADDED = {"variable_seq_lengths": False}


def numbers_by_sequences(mesh, directory: Path, role: str, pipeline: dict, share: bool):
    """(log-probs or values, number of micro-batches, most sequences in one of them) for each of FORWARDS."""
    from fivefold.megatron import step
    from fivefold.megatron.model import MegatronModel

    passes, held, forward = [], [], step._forward

    def watched(iterator, model, batching):
        micro, output = forward(iterator, model, batching)
        held.append(len(micro.batch.lengths_N))
        return micro, output

    step._forward = watched
    for sequences in FORWARDS:
        held.clear()
        policy = replace(
            POLICY,
            tokens_per_micro_batch=40,
            sequences_per_forward=sequences,
            share_prefix=share,
            megatron=MegatronConfig(pipeline=pipeline),
        )
        model = MegatronModel(directory, policy, mesh, value_head=role == "critic")
        numbers_T = model.forward(whole_batch().select(shard_of_replica(mesh.ranks, range(len(LENGTHS)))))
        passes.append((numbers_T, len(held), max(held)))
    return passes


@pytest.mark.parametrize(
    ("layout", "role", "pipeline", "share"),
    [
        ("d1", "policy", {}, False),
        ("d1", "policy", {}, True),
        ("d1", "critic", {}, False),
        ("d2", "policy", {}, False),
        ("t2", "policy", {}, False),
        ("c2", "policy", {}, False),
        ("p2", "policy", PADDED, False),
        ("p2", "policy", {}, False),
    ],
)
def test_passes_without_gradient_take_as_many_sequences_as_asked(cluster, models, layout, role, pipeline, share):
    """The numbers are those of the token budget up to the rounding of other sizes of products."""
    results = cluster.run(numbers_by_sequences, f"megatron:{layout}", models("qwen3"), role, pipeline, share)
    samples_of_rank = len(LENGTHS) // (2 if layout == "d2" else 1)
    for (base_T, by_tokens, _), *others in results:
        assert 1 < by_tokens < samples_of_rank
        for asked, (numbers_T, passes, most) in zip(FORWARDS[1:], others, strict=True):
            assert passes == -(-samples_of_rank // asked) and most <= asked
            torch.testing.assert_close(numbers_T, base_T, atol=2e-6, rtol=1e-5)


def threads_of_a_pass(mesh, directory: Path):
    """Numbers of PyTorch's threads: of the host's work on a micro-batch, of the model, and after the pass."""
    from fivefold.backend import micro_batches as planning
    from fivefold.megatron import step
    from fivefold.megatron.model import MegatronModel

    host, device, make, forward = set(), set(), planning.MicroBatches._make, step._forward

    def made(self, number):
        host.add(torch.get_num_threads())
        return make(self, number)

    def run(iterator, model, batching):
        hook = model.register_forward_pre_hook(lambda *_: device.add(torch.get_num_threads()))
        try:
            return forward(iterator, model, batching)
        finally:
            hook.remove()

    planning.MicroBatches._make, step._forward = made, run
    torch.set_num_threads(3)
    MegatronModel(directory, POLICY, mesh).forward(whole_batch())
    return host, device, torch.get_num_threads()


def test_the_host_wakes_no_threads_for_a_micro_batch_and_the_model_has_all(cluster, models):
    """With 32 threads an operation took 6 ms on a virtual machine, whatever its size, and the device waits meanwhile."""
    (result,) = cluster.run(threads_of_a_pass, "megatron:d1", models("qwen3"))
    assert result == ({1}, {3}, 3)
