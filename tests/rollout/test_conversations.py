"""Trajectories of several turns: what is trained is, token for token, what the engine read and sampled."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fivefold.columns import Column
from fivefold.config.environment import EnvironmentConfig
from fivefold.errors import RunError
from fivefold.interfaces import EngineReplica, Load
from fivefold.rollout.trajectories import Task, Trajectory
from fivefold.types import Completion, Prompt, Sample, Sampling
from tests.support.engines import own_logits
from tests.support.tiny_models import make_tokenizer
from tests.support.toy import scored

CODE = '''
import asyncio, random, time


class Echo:
    """Answers with a text of the seed and the message, after a random time."""

    async def reset(self, task, seed):
        self.draws = random.Random(seed)
        self.left = 1 + self.draws.randrange(4)
        return f"{task['prompt']} {self.draws.randrange(100)}"

    async def step(self, message):
        await asyncio.sleep(0.02 * random.random())
        self.left -= 1
        said = message["content"]
        return {"messages": f"{len(said)} {self.draws.randrange(1000)}?", "reward": len(said) / 8, "done": self.left == 0,
                "state": str(self.left)}


class Once:
    def reset(self, task, seed):
        return None

    def step(self, message):
        return {"done": True, "reward": 1.0}


class Scores(Once):
    def reset(self, task, seed):
        return "a long text"

    def score(self):
        return 1.0


class Forever:
    def reset(self, task, seed):
        return "a"

    def step(self, message):
        return {"messages": "and then?"}


class Two:
    def reset(self, task, seed):
        return str(time.time_ns())

    def step(self, message):
        return {"done": True}


class Fails:
    def reset(self, task, seed):
        return "a"

    def step(self, message):
        raise KeyError("broken")


class Wrong:
    def reset(self, task, seed):
        return "a"

    def step(self, message):
        return {"messages": [{"role": "master", "content": "x"}]}


class Opens:
    """Returns special tokens after the messages of the prompt, and in each observation."""

    def reset(self, task, seed):
        return [*task["prompt"], {"role": "user", "content": "a<|end|>b", "name": "<|end|>"}]

    def step(self, message):
        return {"messages": "c<|end|>d"}


class Slow:
    def reset(self, task, seed):
        return "a"

    def step(self, message):
        time.sleep(0.2)
        return {"messages": "b"}
'''
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% else %}({{ m.content }})\n"
    "{% endif %}{% endfor %}"
)
SAMPLING = Sampling(max_tokens=12, stop=tuple("0123456789ABCDEFGHIJKLM"))
STEPS = (3, 5)
"""Seed and step of the draws."""


@pytest.fixture(scope="module")
def files(tmp_path_factory, models) -> tuple[str, str, str]:
    """(model, tokenizer, environments)."""
    root = tmp_path_factory.mktemp("conversations")
    (root / "envs.py").write_text(CODE)
    return str(models("qwen3")), str(make_tokenizer(root / "tokenizer")), str(root / "envs.py")


class Recording:
    """An engine that keeps what it read and sampled."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.seen = engine, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, requests):
        by_id = {request.id: request for request in requests}
        for completion in self._engine.generate(requests):
            self.seen.append((by_id[completion.request_id], completion))
            yield completion

    def stream(self):
        from fivefold.engines.turns import Turns

        return Turns(self)


class Streamed(Recording):
    """An engine that samples in the background, one request at a time, as servers do."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._requests, self._arrivals = SimpleQueue(), SimpleQueue()
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while True:
            for completion in self.generate([self._requests.get()]):
                self._arrivals.put(completion)

    def stream(self):
        return self

    def submit(self, requests) -> None:
        for request in requests:
            self._requests.put(request)

    def arrived(self, seconds: float):
        with suppress(Empty):
            while (completion := self._arrivals.get(timeout=seconds)) is not None:
                yield completion

    def wake(self) -> None:
        self._arrivals.put(None)

    def load(self) -> Load:
        return Load(0.0, 0.0, 0.0, [])

    def pressure(self) -> None: ...


class Scorer:
    """The sum of the environment's rewards."""

    def submit(self, prompt, sample):
        sample.turns = tuple(replace(turn, reward=turn.given) for turn in sample.turns)
        sample.reward = sum(turn.reward for turn in sample.turns)
        return scored()

    def wait(self, scoring):
        return next((future.result() for future in scoring if future.result() is not None), None)

    def close(self): ...


def engine_of(model: str, tokenizer: Any, ranks: Any, kind: type[Recording]) -> Recording:
    import transformers

    from fivefold.engines.transformers import TransformersEngine

    replica = EngineReplica(ranks.turn, ranks.layout.world_size)
    engine = TransformersEngine(Path(model), tokenizer, torch.device("cpu"), torch.float32, 64, replica)
    source = transformers.AutoModelForCausalLM.from_pretrained(model).float()
    engine.update_weights(((name, p.detach()) for name, p in source.named_parameters()), version=2)
    return kind(engine)


@contextmanager
def generating(mesh, files, name: str | None, most: int = 100, max_failed: float = 0.0,
               kind: type[Recording] = Recording, **settings: Any):  # fmt: skip
    """Make (generator, four prompts, engine) with an environment, or without one."""
    from fivefold.data.dialog import Dialog
    from fivefold.data.tokenizer import load_tokenizer
    from fivefold.environments.pool import EnvironmentPool
    from fivefold.observability.run_logger import RunLogger
    from fivefold.reward.manager import RewardManager
    from fivefold.rollout.conversations import Conversations
    from fivefold.rollout.generation import Generator

    model, words, code = files
    tokenizer = load_tokenizer(words)
    dialog = Dialog.of(tokenizer, {"chat_template": TEMPLATE}, [tokenizer.eos_token_id])
    messages = [[{"role": "user", "content": text}] for text in ("ab", "c", "ab", "d")]
    prompts = [
        Prompt(number, dialog.begin(talk)[0], source="s", text="", ground_truth="", messages=talk)
        for number, talk in enumerate(messages)
    ]
    engine, pool, conversations = engine_of(model, tokenizer, mesh.ranks, kind), None, None
    if name is not None:
        config = EnvironmentConfig(class_=f"{code}:{name}", **settings)
        pool = EnvironmentPool(config)
        pool.start()
        conversations = Conversations(config, dialog, pool, most)
    manager = RewardManager(Scorer(), mesh.ranks, max_failed=max_failed)
    logger = RunLogger(Path(words) / "run", [], is_main=False, steps=1)
    generator = Generator(engine, tokenizer, manager, logger, conversations=conversations)
    try:
        yield generator, prompts, engine
    finally:
        if pool is not None:
            pool.close()


def sample(mesh, files, name: str | None, sampling: Sampling = SAMPLING, most: int = 100, max_failed: float = 0.0,
           kind: type[Recording] = Recording, **settings: Any):  # fmt: skip
    """(groups of this rank, what the engine saw, metrics) of four prompts with an environment, or without one."""
    from fivefold.rollout.conversations import conversation_metrics

    counts: Counter[str] = Counter()
    with generating(mesh, files, name, most, max_failed, kind, **settings) as (generator, prompts, engine):
        groups = generator.sample(prompts, 3, sampling, STEPS, counts=counts)
    return groups, engine.seen, {} if name is None else conversation_metrics(counts, mesh.ranks)


def batch_of(mesh, files, name: str):
    """The samples, what the engine saw, and the packed batch."""
    from fivefold.rollout.packing import pack
    from fivefold.rollout.stats import BatchPlan, gather_stats

    groups, seen, _ = sample(mesh, files, name)
    plan = BatchPlan(1, 1, max_response_tokens=12)
    stats = gather_stats(groups, mesh.ranks, plan)
    return groups, seen, pack(groups, stats, mesh.ranks, plan)


def keys(groups) -> dict[tuple[int, int], Any]:
    """What a trajectory is, by its place: tokens, log-probs, mask, rewards and end."""
    return {
        (group.index, number): (group.context_of(one), one.token_ids, one.logprobs, one.loss_mask, one.end, one.reward,
                                [(turn.begin, turn.end, turn.reward, turn.state) for turn in one.turns])
        for group in groups
        for number, one in enumerate(group.samples)
    }  # fmt: skip


def mask_of(one: Sample) -> list[bool]:
    return one.loss_mask or [True] * len(one.token_ids)


def test_what_is_trained_is_what_the_engine_read_and_sampled(cluster, files):
    ((groups, seen, batch),) = cluster.run(batch_of, "megatron:d1", files, "Echo")
    seen, rows, at = (
        {tuple(request.prompt_ids + completion.token_ids): (request, completion) for request, completion in seen},
        0,
        0,
    )
    for group in groups:
        for one in group.samples:
            context, mask = group.context_of(one), [False] * len(one.token_ids)
            for turn in one.turns:
                request, completion = seen.pop(tuple(context + one.token_ids[: turn.end]))
                assert request.prompt_ids == context + one.token_ids[: turn.begin]
                assert completion.token_ids == one.token_ids[turn.begin : turn.end]
                assert completion.logprobs == one.logprobs[turn.begin : turn.end]
                mask[turn.begin : turn.end] = [True] * (turn.end - turn.begin)
            assert mask_of(one) == mask
            assert all(value == 0.0 for value, is_own in zip(one.logprobs, mask, strict=True) if not is_own)
            # In the batch that is trained on, bit for bit.
            end = at + len(context) + len(one.token_ids)
            assert batch.token_ids_T[at:end].tolist() == context + one.token_ids
            assert batch.loss_mask_T[at:end].tolist() == [False] * len(context) + mask
            of_turns = batch[Column.ROLLOUT_LOGPROBS][at:end][batch.loss_mask_T[at:end]]
            expected = [value for value, is_own in zip(one.logprobs, mask, strict=True) if is_own]
            assert of_turns.tolist() == torch.tensor(expected, dtype=torch.float32).tolist()
            rows, at = rows + len(one.turns), end
    assert not seen and at == len(batch.token_ids_T)
    assert rows > len(groups) * 3


def test_logprobs_of_every_turn_equal_a_recomputation_in_transformers(cluster, files):
    ((groups, _, _),) = cluster.run(sample, "megatron:d1", files, "Echo")
    for group in groups:
        for one in group.samples:
            logits = own_logits(Path(files[0]), group.context_of(one), one.token_ids)
            logprobs = torch.log_softmax(logits, -1).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
            for place, is_own in enumerate(mask_of(one)):
                if is_own:
                    assert one.logprobs[place] == pytest.approx(float(logprobs[place]), abs=1e-4)


def test_observations_are_what_the_template_writes_after_a_turn(cluster, files):
    from fivefold.data.tokenizer import load_tokenizer

    ((groups, _, metrics),) = cluster.run(sample, "megatron:d1", files, "Echo")
    tokenizer, inserted = load_tokenizer(files[1]), 0
    for group in groups:
        for one in group.samples:
            for before, turn in zip(one.turns, one.turns[1:], strict=False):
                between = tokenizer.decode(one.token_ids[before.end : turn.begin])
                ended = one.token_ids[before.end - 1] == tokenizer.eos_token_id
                inserted += not ended
                assert between.startswith("(" if ended else tokenizer.eos_token + "(") and between.endswith("?)\n")
            assert one.token_ids[-1:] == one.token_ids[one.turns[-1].end - 1 :], "nothing follows the last turn"
    assert metrics["turns/inserted_ends"] == inserted > 0


def test_a_cut_observation_has_at_most_its_tokens_with_special_ones_as_text(tmp_path):
    from fivefold.data.dialog import Dialog
    from fivefold.data.tokenizer import load_tokenizer, train_tokenizer
    from fivefold.rollout.conversations import Conversations

    train_tokenizer("bpe", ["abc"], tmp_path, 300)
    tokenizer = load_tokenizer(str(tmp_path))
    dialog = Dialog.of(tokenizer, {"chat_template": TEMPLATE}, [tokenizer.eos_token_id])
    config = EnvironmentConfig(class_="x", max_observation_tokens=64)
    conversations = Conversations(config, dialog, SimpleNamespace(capacity=1), 1000)
    held = Trajectory(Task(Prompt(0, [1], "s", "", ""), 0, 0, (), 0))
    (message,) = conversations._readable(held, [{"role": "user", "content": tokenizer.eos_token * 60}])
    tokens = tokenizer.encode(message["content"], add_special_tokens=False)
    assert len(tokens) <= 64 and tokenizer.eos_token_id not in tokens and held.counts["turns/observations_cut"] == 1


def test_a_trajectory_of_one_turn_is_the_response_of_a_run_without_environment(cluster, files):
    ((plain, _, _),) = cluster.run(sample, "megatron:d1", files, None)
    ((once, _, _),) = cluster.run(sample, "megatron:d1", files, "Once")
    for group, other in zip(plain, once, strict=True):
        assert group.prompt.token_ids == other.prompt.token_ids
        for one, two in zip(group.samples, other.samples, strict=True):
            assert (one.token_ids, one.logprobs, one.text) == (two.token_ids, two.logprobs, two.text)
            assert two.loss_mask is None and two.prompt_ids is None
            assert two.end == ("done" if one.end == "answered" else "length")


def spread(mesh, files, per_worker: int):
    return sample(mesh, files, "Echo", per_worker=per_worker)


def test_processes_order_of_arrival_and_layouts_change_nothing(cluster, files):
    """The environment answers after a time that nothing fixes."""
    (many,) = cluster.run(spread, "megatron:d1", files, 64)
    (alone,) = cluster.run(spread, "megatron:d1", files, 1)
    halves = cluster.run(spread, "megatron:d2", files, 3)
    expected = keys(many[0])
    assert keys(alone[0]) == expected
    # A batch of other rows is padded in another way, which rounds log-probs.
    for key, trajectory in keys([group for half in halves for group in half[0]]).items():
        assert trajectory[:2] + trajectory[3:] == expected[key][:2] + expected[key][3:]
        assert trajectory[2] == pytest.approx(expected[key][2], abs=1e-5)
    assert len({len(trajectory[6]) for trajectory in expected.values()}) > 1


def in_background(mesh, files):
    return sample(mesh, files, "Echo", kind=Streamed)


def test_an_engine_that_samples_in_the_background_gives_the_same_trajectories(cluster, files):
    """Turns of one trajectory are sampled while the environments of others answer."""
    ((undisturbed, _, _),) = cluster.run(sample, "megatron:d1", files, "Echo")
    ((groups, seen, _),) = cluster.run(in_background, "megatron:d1", files)
    expected = keys(undisturbed)
    for key, one in keys(groups).items():
        assert one[:2] + one[3:] == expected[key][:2] + expected[key][3:]
        assert one[2] == pytest.approx(expected[key][2], abs=1e-5)
    assert [len(request.prompt_ids) for request, _ in seen] != sorted(len(request.prompt_ids) for request, _ in seen)


def test_members_of_a_group_start_alike_and_turns_draw_again(cluster, files):
    ((groups, seen, _),) = cluster.run(sample, "megatron:d1", files, "Echo")
    for group in groups:
        assert all(one.prompt_ids is None for one in group.samples)
        assert len({tuple(one.token_ids) for one in group.samples}) == 3
    assert len({request.seed for request, _ in seen}) == len(seen)


def two_starts(mesh, files, same_start: bool):
    try:
        groups, _, _ = sample(mesh, files, "Two", same_start=same_start)
    except RunError as error:
        return str(error)
    return [len({tuple(one.prompt_ids) for one in group.samples}) for group in groups]


def test_a_group_with_two_starts_ends_the_run_and_shows_both_unless_it_may(cluster, files):
    (error,) = cluster.run(two_starts, "megatron:d1", files, True)
    assert "must start alike" in error and "environment.same_start: false" in error
    assert len(set(re.findall(r"\d{19}", error))) == 2
    assert cluster.run(two_starts, "megatron:d1", files, False) == [[3, 3, 3, 3]]


def ends(mesh, files, name, most, settings, sampling=SAMPLING):
    groups, _, metrics = sample(mesh, files, name, sampling, most, max_failed=1.0, **settings)
    return [(one.end, one.finished, one.reward_failed, len(group.context_of(one)) + len(one.token_ids), len(one.turns))
            for group in groups for one in group.samples], metrics  # fmt: skip


@pytest.mark.parametrize(
    ("name", "most", "settings", "expected"),
    [
        ("Forever", 1000, {"max_turns": 3}, ("turns", False, False)),
        ("Forever", 40, {"max_turns": 1000}, ("context", False, False)),
        ("Slow", 1000, {"trajectory_seconds": 0.1}, ("time", False, False)),
        ("Fails", 1000, {}, ("environment", False, True)),
        ("Wrong", 1000, {}, ("environment", False, True)),
        ("Slow", 1000, {"step_seconds": 0.05}, ("environment", False, True)),
        ("Once", 1000, {}, ("done", True, False)),
    ],
)
def test_each_end_of_a_trajectory_has_its_name(cluster, files, name, most, settings, expected):
    ((endings, metrics),) = cluster.run(ends, "megatron:d1", files, name, most, settings)
    # A turn may hit its own limit in any of them.
    assert expected in {ending[:3] for ending in endings} <= {expected, ("length", False, False)}
    assert all(length <= most for *_, length, _ in endings)
    assert metrics.get("environment/failed", 0) == sum(ending[2] for ending in endings)
    if "max_turns" in settings:
        assert max(ending[4] for ending in endings) <= settings["max_turns"]


def opened(mesh, files):
    """Trajectories whose row has a special token too, which data.special_tokens has kept."""
    with generating(mesh, files, "Opens", max_turns=2) as (generator, prompts, _):
        prompts = [replace(prompt, is_chat=True, messages=[{"role": "user", "content": "k<|end|>"}]) for prompt in prompts]
        return generator.sample(prompts, 3, SAMPLING, STEPS, counts=Counter())


def test_special_tokens_of_an_environment_open_no_turn_from_its_reset_on(cluster, files):
    """A message of `reset` that the prompt has too keeps the special tokens that data.special_tokens left in it."""
    from fivefold.data.tokenizer import END, load_tokenizer

    (groups,) = cluster.run(opened, "megatron:d1", files)
    tokenizer, observations = load_tokenizer(files[1]), 0
    assert tokenizer.eos_token == END == "<|end|>"
    for group in groups:
        for one in group.samples:
            context = group.context_of(one)
            assert tokenizer.decode(context).startswith("(k<|end|>)") and context.count(tokenizer.eos_token_id) == 1
            for before, turn in zip(one.turns, one.turns[1:], strict=False):
                # The first one ends the turn before.
                ids = one.token_ids[before.end - 1 : turn.begin]
                assert ids.count(tokenizer.eos_token_id) == 1
                observations += 1
    assert observations > 0


def test_a_turn_may_fill_the_context_to_its_last_token(cluster, files):
    """`max_tokens` of a turn is the least of its own limit and the room that is left; no request is longer."""
    sampling = replace(SAMPLING, stop=(), ignore_eos=True)
    ((endings, _),) = cluster.run(ends, "megatron:d1", files, "Forever", 10, {}, sampling)
    assert {ending[0] for ending in endings} == {"context"} and {ending[3] for ending in endings} == {10}


def too_long(mesh, files):
    try:
        sample(mesh, files, "Echo", most=4)
    except RunError as error:
        return str(error)


def test_a_first_context_without_room_ends_with_context_and_has_no_reward(cluster, files):
    """Nothing was sampled, and nothing is trained; `reward.max_failed` bounds their share, and the run says why."""
    (error,) = cluster.run(too_long, "megatron:d1", files)
    assert "the reward of 12 of 12 samples failed" in error and "leaves no room" in error
    for name in ("Echo", "Scores"):
        ((endings, metrics),) = cluster.run(ends, "megatron:d1", files, name, 4, {})
        assert {ending[:3] + ending[4:] for ending in endings} == {("context", False, True, 0)}
        assert "environment/failed" not in metrics


TOOLS = '''
import time

def add(a: int, b: int) -> int:
    """Add."""
    time.sleep(0.05 / (1 + a))
    return a + b

def fails(a: int) -> int:
    raise ValueError("no")
'''
TOOL_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ {'name': "
    "c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


class Scripted:
    """An engine that says what a script has for each turn, with log-probs of its own."""

    version, replica = 3, EngineReplica(0, 1)

    def __init__(self, tokenizer: Any, script: list[str]) -> None:
        from fivefold.interfaces import EngineState

        self.state, self.seen = EngineState.READY, []
        self._script = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in script]
        self._tokenizer = tokenizer

    def generate(self, requests):
        for request in requests:
            turns_before = self._tokenizer.decode(request.prompt_ids).count("[assistant]") - 1
            tokens = self._script[turns_before]
            self.seen.append(request.prompt_ids)
            yield Completion(request.id, tokens, [-0.5 - turns_before] * len(tokens), "stop", self.version)

    def stream(self):
        from fivefold.engines.turns import Turns

        return Turns(self)

    def look_after(self): ...


def scripted(mesh, root: str, words: str, script: list[str], most: int = 8):
    """(sample, its text with all tokens, metrics) of one trajectory with tools."""
    from fivefold.data.dialog import Dialog
    from fivefold.data.tokenizer import load_tokenizer
    from fivefold.environments.pool import EnvironmentPool
    from fivefold.observability.run_logger import RunLogger
    from fivefold.reward.manager import RewardManager
    from fivefold.rollout.conversations import Conversations, conversation_metrics
    from fivefold.rollout.generation import Generator

    tokenizer = load_tokenizer(words)
    config = EnvironmentConfig(tools=[f"{root}/tools.py:add", f"{root}/tools.py:fails"], max_parallel_calls=most)
    pool = EnvironmentPool(config)
    dialog = Dialog.of(tokenizer, {"chat_template": TOOL_TEMPLATE}, [tokenizer.eos_token_id], pool.start())
    conversations, engine = Conversations(config, dialog, pool, 1000), Scripted(tokenizer, script)
    manager, logger = RewardManager(Scorer(), mesh.ranks), RunLogger(Path(root), [], is_main=False, steps=1)
    generator = Generator(engine, tokenizer, manager, logger, conversations=conversations)
    prompt = Prompt(0, dialog.begin([{"role": "user", "content": "Q"}])[0], source="s", text="", ground_truth="")
    try:
        ((group,),) = [generator.sample([prompt], 1, Sampling(max_tokens=200), STEPS, counts=(counts := Counter()))]
    finally:
        pool.close()
    (one,) = group.samples
    return one, tokenizer.decode(group.context_of(one) + one.token_ids), conversation_metrics(counts, mesh.ranks)


@pytest.fixture
def tools(tmp_path) -> tuple[str, str]:
    from fivefold.data.tokenizer import train_tokenizer

    (tmp_path / "tools.py").write_text(TOOLS)
    train_tokenizer("bpe", ["abc"], tmp_path / "words", 300)
    return str(tmp_path), str(tmp_path / "words")


def call(name: str, **arguments: Any) -> str:
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


def test_calls_are_answered_in_their_order_and_the_turn_without_one_ends_it(cluster, tools):
    script = [call("add", a=1, b=2) + call("add", a=9, b=2), "so " + call("fails", a=1), "11"]
    ((one, text, metrics),) = cluster.run(scripted, "megatron:d1", *tools, script)
    assert text == (
        f"[user]Q<|end|>[assistant]{script[0]}<|end|>[tool]3<|end|>[tool]11<|end|>[assistant]{script[1]}<|end|>"
        "[tool]Error: ValueError: no<|end|>[assistant]11<|end|>"
    )
    assert (one.end, len(one.turns), one.text) == ("answered", 3, "\n".join(script))
    assert metrics["tools/add/calls"] == 2 and metrics["tools/fails/errors"] == metrics["tools/fails/calls"] == 1
    assert metrics["turns/inserted_ends"] == 0 and "tools/malformed" not in metrics
    # Nothing that was sampled is written again: log-probs stand where the engine gave them, and nowhere else.
    for turn, value in zip(one.turns, (-0.5, -1.5, -2.5), strict=True):
        assert one.logprobs[turn.begin : turn.end] == [value] * (turn.end - turn.begin)
    assert one.loss_mask.count(True) == sum(turn.end - turn.begin for turn in one.turns)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (call("add", a=1), "add needs the argument 'b'"),
        (call("sub", a=1), "there is no tool 'sub'; the tools are add, fails"),
        (call("add", a="1", b=2), "add: the argument 'a' must be integer: got '1'"),
        ('<tool_call>{"name": "add",}</tool_call>', "the call cannot be read: "),
        ('<tool_call>{"name": "add"', "a call begins with '<tool_call>' and does not end"),
    ],
)
def test_a_malformed_call_is_answered_and_counted_and_never_dropped(cluster, tools, response, answer):
    ((one, text, metrics),) = cluster.run(scripted, "megatron:d1", *tools, [response, "ok"])
    assert f"{response}<|end|>[tool]Error: {answer}" in text
    assert metrics["tools/malformed"] == 1 and one.end == "answered" and len(one.turns) == 2


def test_calls_beyond_the_most_of_a_turn_are_answered_with_that(cluster, tools):
    ((_, text, metrics),) = cluster.run(scripted, "megatron:d1", *tools, [call("add", a=1, b=1) * 3, "ok"], 2)
    assert "[tool]2<|end|>[tool]2<|end|>[tool]Error: a turn may call at most 2 tools<|end|>" in text
    assert metrics["tools/add/calls"] == 2 and metrics["tools/malformed"] == 1


def evaluated_between(mesh, files):
    """Metrics of a training step: alone, and after an evaluation."""
    from fivefold.rollout.sources import EngineRollouts, PromptQueue

    metrics = []
    with generating(mesh, files, "Echo") as (generator, prompts, _):

        class Loader:
            steps_per_epoch = 1

            def epoch(self, position):
                return 0.0

            def take(self, begin, count):
                return prompts

        for is_evaluated in (False, True):
            queue = PromptQueue(Loader(), generator.logger)
            source = EngineRollouts(
                generator,
                queue,
                generator.logger,
                SAMPLING,
                seed=3,
                group_size=3,
                prompts_per_call=4,
                with_greedy=is_evaluated,
            )
            if is_evaluated:
                generator.sample(prompts, 2, SAMPLING, (9, 0))
            source.next(5)
            metrics.append(
                {name: value for name, value in generator.logger.pending.items() if name.startswith(("turns/", "tools/"))}
            )
    return metrics


def test_trajectories_of_an_evaluation_and_greedy_ones_are_not_counted_in_the_step(cluster, files):
    ((alone, after),) = cluster.run(evaluated_between, "megatron:d1", files)
    assert alone == after and alone["turns/inserted_ends"] > 0


def greedy(mesh, files):
    """Groups with a greedy trajectory as their baseline, and those trajectories."""
    from fivefold.rollout.sources import EngineRollouts, PromptQueue

    with generating(mesh, files, "Echo") as (generator, prompts, engine):

        class Loader:
            steps_per_epoch = 1

            def epoch(self, position):
                return 0.0

            def take(self, begin, count):
                return prompts

        queue = PromptQueue(Loader(), generator.logger)
        source = EngineRollouts(
            generator, queue, generator.logger, SAMPLING, seed=3, group_size=3, prompts_per_call=4, with_greedy=True
        )
        groups = source.next(5)
        most_likely = replace(SAMPLING, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        return groups, generator.sample(prompts, 1, most_likely, (3, 5)), [request for request, _ in engine.seen]


def test_the_greedy_baseline_of_a_group_is_a_trajectory_of_the_most_likely_turns(cluster, files):
    ((groups, others, seen),) = cluster.run(greedy, "megatron:d1", files)
    for group, other in zip(groups, others, strict=True):
        (one,) = other.samples
        assert group.greedy_reward == one.reward == sum(turn.reward for turn in one.turns)
        assert group.greedy_length == one.loss_tokens and group.context_of(group.samples[0]) == other.context_of(one)
    assert len({group.greedy_reward for group in groups}) > 1 and max(len(other.samples[0].turns) for other in others) > 1
    assert {request.sampling.temperature for request in seen} == {0.0, 1.0}


@pytest.mark.parametrize("name", ["Once", "Echo"])
def test_the_first_turns_of_a_group_answer_one_state_however_they_end(cluster, files, name):
    ((groups, _, _),) = cluster.run(sample, "megatron:d1", files, name)
    turns = [one.turns for group in groups for one in group.samples]
    assert {turns_of_one[0].state for turns_of_one in turns} == {""}
    assert all(turn.state not in ("", None) for turns_of_one in turns for turn in turns_of_one[1:])
