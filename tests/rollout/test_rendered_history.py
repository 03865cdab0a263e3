"""Trajectories whose template renders earlier turns again: what it changes begins a sequence, and nothing held is changed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.algo.objective import make_objective
from fivefold.config import RunConfig
from fivefold.config.environment import EnvironmentConfig
from fivefold.config.schema import DataConfig, ModelConfig
from fivefold.interfaces import EngineReplica, EngineState
from fivefold.types import Completion, Prompt, Sampling
from tests.rollout.test_conversations import STEPS, TOOLS, call
from tests.support.toy import scored

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SCRIPT = [
    "<think>x</think>" + call("add", a=1, b=2),
    "abc" + call("add", a=2, b=2),
    "<think>y</think>abc" + call("add", a=3, b=2),
    "abc",
]


class Spelling:
    """An engine that says what a script has for each turn, in tokens of single characters."""

    version, replica, state = 3, EngineReplica(0, 1), EngineState.READY

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.seen = tokenizer, []

    def generate(self, requests):
        for request in requests:
            turns_before = self.tokenizer.decode(request.prompt_ids).count("[assistant]") - 1
            tokens = [
                token for letter in SCRIPT[turns_before] for token in self.tokenizer.encode(letter, add_special_tokens=False)
            ]
            tokens.append(self.tokenizer.eos_token_id)
            is_cut = len(tokens) > request.sampling.max_tokens
            tokens = tokens[: request.sampling.max_tokens]
            self.seen.append((request.prompt_ids, tokens))
            yield Completion(
                request.id, tokens, [-0.5 - turns_before] * len(tokens), "length" if is_cut else "stop", self.version
            )

    def stream(self):
        from fivefold.engines.turns import Turns

        return Turns(self)

    def look_after(self): ...


class Length:
    """A reward for all turns of a trajectory, whichever sequence they are in."""

    def submit(self, prompt, *sequences):
        for one in sequences:
            one.reward = float(len({turn.number for sequence in sequences for turn in sequence.turns}))
        return scored()

    def wait(self, scoring):
        return None

    def close(self): ...


def sampled(mesh, root: str, most: int):
    """(samples, what the engine read and sampled, texts of the contexts, statistics of the step) of one trajectory."""
    from fivefold.data.dialog import Dialog
    from fivefold.data.tokenizer import load_tokenizer
    from fivefold.environments.pool import EnvironmentPool
    from fivefold.observability.run_logger import RunLogger
    from fivefold.reward.manager import RewardManager
    from fivefold.rollout.conversations import Conversations
    from fivefold.rollout.generation import Generator
    from fivefold.rollout.stats import BatchPlan, gather_stats, rollout_metrics

    tokenizer = load_tokenizer(f"{root}/words")
    assert len(tokenizer.encode("abc", add_special_tokens=False)) == 1
    config = EnvironmentConfig(tools=[f"{root}/tools.py:add"], history="template")
    pool = EnvironmentPool(config)
    dialog = Dialog.of(tokenizer, {"chat_template": TEMPLATE}, [tokenizer.eos_token_id], pool.start(), config.history)
    engine, conversations = Spelling(tokenizer), Conversations(config, dialog, pool, most)
    manager, logger = RewardManager(Length(), mesh.ranks), RunLogger(Path(root), [], is_main=False, steps=1)
    generator = Generator(engine, tokenizer, manager, logger, conversations=conversations)
    messages = [{"role": "user", "content": "Q"}]
    prompt = Prompt(0, dialog.begin(messages)[0], source="s", text="", ground_truth="", messages=messages)
    try:
        (group,) = generator.sample([prompt], 1, Sampling(max_tokens=200), STEPS, counts=Counter())
    finally:
        pool.close()
    stats = gather_stats([group], mesh.ranks, BatchPlan(1, 1, max_response_tokens=200))
    contexts = [group.context_of(one) for one in group.samples]
    return group.samples, contexts, engine.seen, [tokenizer.decode(tokens) for tokens in contexts], rollout_metrics(stats, 3)


@pytest.fixture
def root(tmp_path) -> str:
    from fivefold.data.tokenizer import train_tokenizer

    (tmp_path / "tools.py").write_text(TOOLS)
    train_tokenizer("bpe", ["abc"], tmp_path / "words", 300)
    return str(tmp_path)


def test_dropped_thinking_begins_a_sequence_and_each_turn_is_trained_once(cluster, root):
    ((samples, contexts, seen, texts, metrics),) = cluster.run(sampled, "megatron:d1", root, 1000)
    first, second, third = texts
    one, two, three = (text.rpartition("</think>")[2] for text in SCRIPT[:3])
    assert first == "[user]Q<|end|>[assistant]"
    assert second == f"{first}{one}<|end|>[tool]3<|end|>[assistant]"
    assert third == f"{second}{two}<|end|>[tool]4<|end|>[assistant]{three}<|end|>[tool]5<|end|>[assistant]"
    assert [one.break_cause for one in samples] == [None, "template", "template"]
    assert [[turn.number for turn in one.turns] for one in samples] == [[0], [1, 2], [3]]
    # Token for token what the engine read and sampled, and no token that it sampled was encoded again.
    trained = 0
    for one, context in zip(samples, contexts, strict=True):
        for turn in one.turns:
            assert seen[turn.number] == (context + one.token_ids[: turn.begin], one.token_ids[turn.begin : turn.end])
            assert one.logprobs[turn.begin : turn.end] == [-0.5 - turn.number] * (turn.end - turn.begin)
        sampled_tokens = sum(turn.end - turn.begin for turn in one.turns)
        assert (one.loss_mask or [True] * len(one.token_ids)).count(True) == sampled_tokens
        trained += sampled_tokens
    assert trained == sum(len(tokens) for _, tokens in seen) and len(seen) == 4
    assert metrics["trajectory/sequences"] == 3 and metrics["trajectory/breaks_template"] == 2
    assert len({(one.reward, one.trajectory, one.end) for one in samples}) == 1 and samples[0].end == "answered"


def thoughtful(mesh, root: str, most: int) -> tuple[int, set[str]]:
    """(tokens sampled, ends) of a trajectory whose thinking the template drops: no sequence has all of it."""
    script, SCRIPT[:] = SCRIPT[:], [f"<think>{'x' * 70}</think>" + call("add", a=turn, b=2) for turn in range(3)] + ["abc"]
    try:
        samples = sampled(mesh, root, most)[0]
    finally:
        SCRIPT[:] = script
    return sum(one.loss_tokens for one in samples), {one.end for one in samples}


def test_sampled_tokens_of_several_sequences_are_bounded_by_their_turns_only(cluster, root):
    """data.max_total_tokens bounds a sequence. Taken as the bound of all, it gave a trajectory within every limit the whole
    overlong penalty."""
    data = DataConfig(max_response_tokens=200, max_total_tokens=400)
    environment = EnvironmentConfig(tools=["a.py:add"], history="template")
    config = RunConfig(ModelConfig("m"), data=data, environment=environment)
    ((tokens, ends),) = cluster.run(thoughtful, "megatron:d1", root, config.max_sequence_tokens)
    assert tokens > 400 and ends == {"answered"}
    assert config.max_sampled_tokens == 10 * 200
    assert make_objective("dapo").shaping(torch.ones(1), torch.tensor([tokens]), config.max_sampled_tokens).tolist() == [1.0]
    assert replace(config, environment=EnvironmentConfig(agent="a.py:run")).max_sampled_tokens == 10 * 200
    assert replace(config, environment=replace(environment, history="append")).max_sampled_tokens == 400


def test_a_context_that_the_template_makes_too_long_ends_the_trajectory(cluster, root):
    ((samples, contexts, seen, _, _),) = cluster.run(sampled, "megatron:d1", root, 120)
    assert {one.end for one in samples} == {"context"} and len(seen) < len(SCRIPT)
    assert all(len(context) + len(one.token_ids) <= 120 for one, context in zip(samples, contexts, strict=True))
