"""A model with a value head: values against transformers, the critic's step and PPO's on every kind of layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fivefold.algo.advantages import AdvantageInputs
from fivefold.algo.objective import make_objective
from fivefold.algo.values import ValueLoss
from fivefold.columns import Column
from fivefold.config.learners import PolicyConfig
from fivefold.types import TokenBatch
from tests.support import loops
from tests.support.cluster import Together
from tests.support.layout_cases import VPP2, Case
from tests.support.objectives import Alone
from tests.support.shards import shard_of_replica
from tests.support.tiny_models import load_tensors, make_classifier
from tests.support.two_steps import (
    BOUNDS,
    LENGTHS,
    MAX_RESPONSE,
    OPTIMIZER,
    POLICY,
    PROMPTS,
    difference,
    policy_of,
    whole_batch,
)

LAYOUTS = ["d1", "d2", "t2", "p2", "c2", "d2t2", "t2c2", "p2c2", "t2p2"]
CLIP, GAMMA, LAM = 0.3, 0.95, 0.9
PPO = make_objective("ppo", gamma=GAMMA, lam=LAM, bootstrap_truncated=True)
REWARDS = [1.0, 0, 0, 1, 0.5, 0, 1, 0]
FINISHED = [True, False, True, True, True, True, False, True]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return make_classifier(tmp_path_factory.mktemp("classifier"))


def hf_values(directory: Path, batch: TokenBatch, model=None):
    """The value at every token, by transformers."""
    import transformers

    model = model or transformers.AutoModelForSequenceClassification.from_pretrained(directory).float()
    values, start = [], 0
    for length in batch.lengths_N:
        hidden = model.model(batch.token_ids_T[start : start + length][None])[0][0]
        values.append(hidden @ model.score.weight[0])
        start += length
    return torch.cat(values)


def wanted_places() -> torch.Tensor:
    """From the token before the response to its last one."""
    mask, start = torch.zeros(sum(LENGTHS), dtype=torch.bool), 0
    for length, prompt in zip(LENGTHS, PROMPTS, strict=True):
        mask[start + prompt - 1 : start + length] = True
        start += length
    return mask


def values_of(mesh, directory: Path, policy: PolicyConfig):
    from fivefold.megatron.model import MegatronModel

    model = MegatronModel(directory, policy, mesh, value_head=True)
    mine = shard_of_replica(mesh.ranks, range(len(LENGTHS)))
    batch = whole_batch().select(mine)
    # A temperature divides logits, not values.
    return mine, model.forward(replace(batch, temperature=0.3))


@pytest.mark.parametrize("layout", [*LAYOUTS, "p2 vpp"])
def test_values_equal_those_of_transformers(steps, classifier, layout):
    batch = whole_batch()
    expected = hf_values(classifier, batch).detach() * wanted_places()
    for mine, values_T in steps[values_of, layout.removesuffix(" vpp"), "vpp" in layout]:
        assert torch.allclose(values_T, expected[batch.token_index(mine)], atol=2e-6)
    assert expected.abs().max() > 0.3


@pytest.mark.parametrize("layout", ["d2e2", "t2e2"])
def test_values_of_a_model_with_experts_equal_those_of_transformers(cluster, tmp_path, layout):
    directory = make_classifier(tmp_path, "qwen3_moe")
    batch = whole_batch()
    expected = hf_values(directory, batch).detach() * wanted_places()
    for mine, values_T in cluster.run(
        values_of, f"megatron:{layout}", directory, replace(POLICY, tokens_per_micro_batch=32)
    ):
        assert torch.allclose(values_T, expected[batch.token_index(mine)], atol=2e-6)


def test_a_value_head_that_is_not_there_starts_at_zero(cluster, models):
    for _, values in cluster.run(values_of, "megatron:t2", models("qwen3_tied"), POLICY):
        assert not values.any()


def with_returns(batch: TokenBatch, values_T: torch.Tensor) -> TokenBatch:
    scores = AdvantageInputs(torch.tensor(REWARDS), torch.arange(8), torch.tensor(LENGTHS) - torch.tensor(PROMPTS))
    batch = batch.with_columns({Column.VALUES: values_T})
    advantages_T, returns_T = PPO.advantages(batch, scores, torch.tensor(FINISHED), Alone())
    weights_N = PPO.loss_weights(scores.lengths_N, MAX_RESPONSE)
    return batch.with_columns(
        {Column.ADVANTAGES: advantages_T, Column.RETURNS: returns_T, Column.LOSS_WEIGHTS: batch.expand_to_tokens(weights_N)}
    )


def test_gae_of_the_batch_equals_the_loop():
    batch = whole_batch()
    values = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(4))
    assigned = replace(with_returns(batch, values))
    plain, _ = replace(PPO, advantage=replace(PPO.advantage, whiten=False)).advantages(
        batch.with_columns({Column.VALUES: values}), AdvantageInputs(torch.tensor(REWARDS), torch.arange(8), torch.tensor(LENGTHS)),
        torch.tensor(FINISHED), Alone(),
    )  # fmt: skip
    start, everything = 0, []
    for i, (length, prompt) in enumerate(zip(LENGTHS, PROMPTS, strict=True)):
        tokens = list(range(start + prompt, start + length))
        rewards = [0.0] * (len(tokens) - 1) + [REWARDS[i]]
        behind = 0.0 if FINISHED[i] else float(values[tokens[-1]])
        advantages, returns = loops.gae(rewards, [float(values[t - 1]) for t in tokens], behind, GAMMA, LAM)
        assert plain[tokens].tolist() == pytest.approx(advantages, rel=1e-4, abs=1e-5)
        assert assigned[Column.RETURNS][tokens].tolist() == pytest.approx(returns, rel=1e-4, abs=1e-5)
        everything += advantages
        start += length
    whitened = assigned[Column.ADVANTAGES][batch.loss_mask_T]
    expected = torch.tensor(everything, dtype=torch.float64)
    expected = (expected - expected.mean()) / (expected.var() + 1e-8).sqrt()
    assert torch.allclose(whitened.double(), expected, atol=1e-5)


def adam_of(model):
    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decay, "weight_decay": OPTIMIZER.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=tuple(OPTIMIZER.betas), eps=OPTIMIZER.eps)


def reference_critic(directory: Path, tmp: Path):
    """Two steps of the critic written out: ([(loss, norm)], parameters by name, values before)."""
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory).float()
    adam = adam_of(model)
    base = hf_values(directory, whole_batch(), model).detach() * wanted_places()
    batch = with_returns(whole_batch(), base)
    results = []
    for _ in range(2):
        values, loss = hf_values(directory, batch, model), torch.zeros(())
        for t in batch.loss_mask_T.nonzero()[:, 0].tolist():
            value, old, target = values[t - 1], base[t - 1], batch[Column.RETURNS][t]
            near = value.clamp(old - CLIP, old + CLIP)
            loss = loss + 0.5 * torch.maximum((value - target) ** 2, (near - target) ** 2) / batch.update_tokens
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)
        adam.step()
        results.append((loss.item(), norm.item()))
    model.save_pretrained(tmp)
    return results, load_tensors(tmp), base


def critic_step(mesh, directory: Path, policy: PolicyConfig, base_T: torch.Tensor):
    from fivefold.megatron.model import MegatronModel

    model = MegatronModel(directory, policy, mesh, total_updates=2, value_head=True)
    mine = with_returns(whole_batch(), base_T).select(shard_of_replica(mesh.ranks, range(len(LENGTHS))))
    reports = [model.train_step(mine, ValueLoss(CLIP)) for _ in range(2)]
    model.verify()
    return reports, {name: tensor.clone() for name, tensor in model.weights()}


def twice_the_head_s_gradient(mesh, *arguments):
    """Every tensor-parallel rank computes the whole value: summing their gradients counts it tp times."""
    from fivefold.megatron.layers import lm_head

    original = lm_head.gather_from_sequence_parallel_region

    def summing(hidden, tensor_parallel_output_grad, group):
        return original(hidden, tensor_parallel_output_grad=True, group=group)

    lm_head.gather_from_sequence_parallel_region = summing
    return critic_step(mesh, *arguments)


@pytest.fixture(scope="module")
def critic_oracle(classifier, tmp_path_factory):
    return reference_critic(classifier, tmp_path_factory.mktemp("oracle"))


@pytest.fixture(scope="module")
def steps(cluster, models, classifier, critic_oracle, ppo_oracle):
    """Results by (function, layout), and of values by (function, layout, whether stages are virtual)."""
    policy = replace(POLICY, tokens_per_micro_batch=32)
    calls = {}
    for layout in LAYOUTS:
        name = f"megatron:{layout}"
        calls[values_of, layout, False] = (name, values_of, classifier, policy)
        calls[critic_step, layout] = (name, critic_step, classifier, policy, critic_oracle[2])
        calls[ppo_step, layout] = (name, ppo_step, models("qwen3"), classifier, policy, ppo_oracle[2])
    calls[values_of, "p2", True] = ("megatron:p2", values_of, classifier, policy_of("qwen3", Case("p2", VPP2), 32))
    return Together(cluster, calls)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_critic_s_step_is_the_same_on_every_layout(steps, critic_oracle, layout):
    results = steps[critic_step, layout]
    for size, bound in zip(difference(results, critic_oracle), BOUNDS, strict=True):
        assert size <= bound


def test_a_head_whose_gradient_is_counted_on_every_tensor_parallel_rank_is_seen(cluster, classifier, critic_oracle):
    results = cluster.run(twice_the_head_s_gradient, "megatron:t2", classifier, POLICY, critic_oracle[2])
    assert difference(results, critic_oracle)[1] > 0.1


def ppo_step(mesh, directory: Path, critic_directory: Path, policy: PolicyConfig, old_T: torch.Tensor, critic_policy=None):
    """Values, GAE, whitening over replicas, then one step of both models: what the loop does."""
    from fivefold.megatron.model import MegatronModel

    actor = MegatronModel(directory, policy, mesh, total_updates=1)
    critic = MegatronModel(critic_directory, critic_policy or policy, mesh, total_updates=1, value_head=True)
    mine = shard_of_replica(mesh.ranks, range(len(LENGTHS)))
    whole = whole_batch().with_columns({Column.OLD_LOGPROBS: old_T})
    batch = whole.select(mine).with_columns({Column.VALUES: critic.forward(whole.select(mine))})

    responses = torch.tensor(LENGTHS) - torch.tensor(PROMPTS)
    scores = AdvantageInputs(torch.tensor(REWARDS), torch.arange(8), responses)
    advantages_T, returns_T = PPO.advantages(batch, scores, torch.tensor(FINISHED), mesh.ranks)
    weights_N = PPO.loss_weights(responses, MAX_RESPONSE)[mine]
    batch = batch.with_columns(
        {Column.ADVANTAGES: advantages_T, Column.RETURNS: returns_T, Column.LOSS_WEIGHTS: batch.expand_to_tokens(weights_N)}
    )
    reports = [critic.train_step(batch, ValueLoss(CLIP)), actor.train_step(batch, PPO.loss)]
    weights = {
        f"{who}.{name}": tensor.clone()
        for who, model in (("critic", critic), ("policy", actor))
        for name, tensor in model.weights()
    }
    return reports, weights


@pytest.fixture(scope="module")
def ppo_oracle(models, classifier, critic_oracle, tmp_path_factory):
    """The same step with transformers and torch.optim.AdamW."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(models("qwen3")).float()
    adam = adam_of(model)
    batch = with_returns(whole_batch(), critic_oracle[2])

    def logprobs():
        logprobs, start = [], 0
        for length in LENGTHS:
            tokens = batch.token_ids_T[start : start + length]
            logp = torch.log_softmax(model(tokens[None]).logits[0] / batch.temperature, -1)
            logprobs.append(torch.cat([torch.zeros(1), logp[:-1].gather(1, tokens[1:, None])[:, 0]]))
            start += length
        return torch.cat(logprobs)

    now = logprobs()
    old = (now.detach() + batch[Column.OLD_LOGPROBS]) * batch.loss_mask_T
    loss = torch.zeros(())
    for t in batch.loss_mask_T.nonzero()[:, 0].tolist():
        ratio, advantage = (now[t] - old[t]).exp(), batch[Column.ADVANTAGES][t]
        loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) / batch.update_tokens
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)
    adam.step()
    directory = tmp_path_factory.mktemp("ppo")
    model.save_pretrained(directory)
    critic = transformers.AutoModelForSequenceClassification.from_pretrained(classifier).float()
    critic_adam = adam_of(critic)
    values, value_loss = hf_values(classifier, batch, critic), torch.zeros(())
    for t in batch.loss_mask_T.nonzero()[:, 0].tolist():
        # The first step's values are the old ones, so nothing is clipped.
        value_loss = value_loss + 0.5 * (values[t - 1] - batch[Column.RETURNS][t]) ** 2 / batch.update_tokens
    value_loss.backward()
    value_norm = torch.nn.utils.clip_grad_norm_(critic.parameters(), OPTIMIZER.clip_grad)
    critic_adam.step()
    other = tmp_path_factory.mktemp("ppo-critic")
    critic.save_pretrained(other)
    state = {f"policy.{name}": tensor for name, tensor in load_tensors(directory).items()}
    state |= {f"critic.{name}": tensor for name, tensor in load_tensors(other).items()}
    return [(value_loss.item(), value_norm.item()), (loss.item(), norm.item())], state, old


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_ppo_step_is_the_same_on_every_layout(steps, ppo_oracle, layout):
    results = steps[ppo_step, layout]
    for size, bound in zip(difference(results, ppo_oracle), BOUNDS, strict=True):
        assert size <= bound


@pytest.mark.parametrize("virtual", ["policy", "critic"])
def test_policy_and_critic_may_have_different_virtual_stages(cluster, models, classifier, ppo_oracle, virtual):
    plain, staged = (policy_of("qwen3", case, 32) for case in (Case("p2"), Case("p2", VPP2)))
    policy, critic = (staged, plain) if virtual == "policy" else (plain, staged)
    results = cluster.run(ppo_step, "megatron:p2", models("qwen3"), classifier, policy, ppo_oracle[2], critic)
    for size, bound in zip(difference(results, ppo_oracle), BOUNDS, strict=True):
        assert size <= bound
