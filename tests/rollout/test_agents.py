"""Trajectories of agents: a program samples its turns at the endpoint, and what it read and got is trained, exact to the token."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.columns import Column
from fivefold.config.environment import EndpointConfig, EnvironmentConfig
from fivefold.errors import RunError
from fivefold.types import Prompt, Sampling
from tests.rollout.test_conversations import (
    SAMPLING,
    STEPS,
    TEMPLATE,
    Recording,
    Streamed,
    engine_of,
    keys,
    mask_of,
)
from tests.rollout.test_conversations import Scorer as One
from tests.support.documented import undocumented
from tests.support.tiny_models import make_tokenizer
from tests.support.toy import scored


class Scorer(One):
    """The sum of the rewards of a trajectory's turns, for all its sequences."""

    def submit(self, prompt, *sequences):
        for one in sequences:
            one.reward = sum(turn.given for sequence in sequences for turn in sequence.turns)
        return scored()


CODE = '''
import asyncio, json, os, random, signal, sys, threading, time, urllib.error, urllib.request


def chat(base_url, api_key, messages, **settings):
    """The answer of a turn as a message, with a client that is no more than urllib."""
    request = urllib.request.Request(
        base_url + "/chat/completions",
        json.dumps({"model": "x", "messages": messages, **settings}).encode(),
        {"Authorization": "Bearer " + api_key, "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]


def talks(task, base_url, api_key):
    """Two to four turns, as many as the task and the answers say, with pauses."""
    messages = [{"role": "user", "content": task["prompt"][0]["content"]}]
    for turn in range(4):
        said = chat(base_url, api_key, messages)
        time.sleep(0.01 * random.random())
        messages += [said, {"role": "user", "content": f"{len(said['content'])}?"}]
        if turn and len(said["content"]) % 2:
            break
    return {"turns": turn / 10, "length": len(said["content"]) / 8}


def long(task, base_url, api_key):
    return len(chat(base_url, api_key, [{"role": "user", "content": "a" * 1000}])["content"])


async def team(task, base_url, api_key):
    """Two sub-agents at once, with contexts of their own."""
    def work(name):
        messages = [{"role": "user", "content": name}]
        messages += [chat(base_url, api_key, messages), {"role": "user", "content": "b"}]
        return chat(base_url, api_key, messages)
    said = await asyncio.gather(*(asyncio.to_thread(work, name) for name in "ac"))
    return float(sum(len(each["content"]) for each in said))


def retries(task, base_url, api_key):
    """Each request twice, as a client does that lost the first answer."""
    messages = [{"role": "user", "content": "a"}]
    for turn in range(2):
        for count in range(2):
            request = urllib.request.Request(base_url + "/chat/completions", json.dumps({"messages": messages}).encode(),
                {"Authorization": "Bearer " + api_key, "x-stainless-retry-count": str(count)})
            with urllib.request.urlopen(request, timeout=60) as answer:
                said = json.load(answer)["choices"][0]["message"]
        messages += [said, {"role": "user", "content": "b"}]
    return 1.0


def raises(task, base_url, api_key):
    chat(base_url, api_key, [{"role": "user", "content": "a"}])
    raise KeyError("broken")


def dies(task, base_url, api_key):
    chat(base_url, api_key, [{"role": "user", "content": "a"}])
    os.kill(os.getpid(), signal.SIGKILL)


def sleeps(task, base_url, api_key):
    chat(base_url, api_key, [{"role": "user", "content": "a"}])
    time.sleep(30)


def silent(task, base_url, api_key):
    return 1.0


def nothing(task, base_url, api_key):
    chat(base_url, api_key, [{"role": "user", "content": "a"}])


def infinite(task, base_url, api_key):
    chat(base_url, api_key, [{"role": "user", "content": "a"}])
    return float("inf")


def endless(task, base_url, api_key):
    messages = [{"role": "user", "content": "a"}]
    while True:
        messages += [chat(base_url, api_key, messages), {"role": "user", "content": "b"}]


def refused(base_url, api_key):
    try:
        chat(base_url, api_key, [{"role": "user", "content": "a" * 1000}])
    except urllib.error.HTTPError as error:
        assert json.load(error)["error"]["code"] == "context_length_exceeded"


def recovers(task, base_url, api_key):
    refused(base_url, api_key)
    chat(base_url, api_key, [{"role": "user", "content": "a"}])
    return 1.0


def recovers_and_raises(task, base_url, api_key):
    raise KeyError(recovers(task, base_url, api_key))


def recovers_and_dies(task, base_url, api_key):
    recovers(task, base_url, api_key)
    os.kill(os.getpid(), signal.SIGKILL)


def recovers_to_nan(task, base_url, api_key):
    return float("nan") * recovers(task, base_url, api_key)


def gives_up(task, base_url, api_key, reward=1.0):
    chat(base_url, api_key, [{"role": "user", "content": "a"}])
    refused(base_url, api_key)
    return reward


def gives_up_with_nan(task, base_url, api_key):
    return gives_up(task, base_url, api_key, float("nan"))


if __name__ == "__main__":
    task = json.loads(sys.stdin.readline())
    print("it may print what it likes")
    print(json.dumps(talks(task, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])))
'''


@pytest.fixture(scope="module")
def files(tmp_path_factory, models) -> tuple[str, str, str]:
    """(model, tokenizer, agents)."""
    root = tmp_path_factory.mktemp("agents")
    (root / "agents.py").write_text(CODE)
    return str(models("qwen3")), str(make_tokenizer(root / "tokenizer")), str(root / "agents.py")


def sample(mesh, files, agent: str, sampling: Sampling = SAMPLING, most: int = 200, max_failed: float = 0.0,
           kind: type[Recording] = Recording, **settings: Any):  # fmt: skip
    """(groups of this rank, what the engine saw, metrics) of four prompts with an agent."""
    from collections import Counter

    from fivefold.data.dialog import Dialog
    from fivefold.data.tokenizer import load_tokenizer
    from fivefold.environments.pool import EnvironmentPool
    from fivefold.observability.run_logger import RunLogger
    from fivefold.reward.manager import RewardManager
    from fivefold.rollout.agents import Agents
    from fivefold.rollout.conversations import conversation_metrics
    from fivefold.rollout.endpoint import Endpoint
    from fivefold.rollout.generation import Generator
    from fivefold.rollout.sessions import Dialogs

    model, words, code = files
    tokenizer = load_tokenizer(words)
    dialog = Dialog.of(tokenizer, {"chat_template": TEMPLATE}, [tokenizer.eos_token_id])
    messages = [[{"role": "user", "content": text}] for text in ("ab", "c", "ab", "d")]
    prompts = [
        Prompt(number, dialog.begin(talk)[0], source="s", text="", ground_truth="", messages=talk, is_chat=True)
        for number, talk in enumerate(messages)
    ]
    engine = engine_of(model, tokenizer, mesh.ranks, kind)
    config = EnvironmentConfig(agent=agent.replace("FILE", code) if " " in agent else f"{code}:{agent}", **settings)
    pool = EnvironmentPool(config)
    pool.start()
    endpoint = Endpoint(Dialogs(dialog), EndpointConfig(), "tiny", config.max_turns, most)
    endpoint.start()
    conversations = Agents(config, dialog, pool, most, endpoint, needs_reward=True)
    manager = RewardManager(Scorer(), mesh.ranks, max_failed=max_failed)
    logger = RunLogger(Path(words) / "run", [], is_main=False, steps=1)
    generator = Generator(engine, tokenizer, manager, logger, conversations=conversations)
    counts: Counter[str] = Counter()
    try:
        groups = generator.sample(prompts, 3, sampling, STEPS, counts=counts)
    finally:
        endpoint.close()
        pool.close()
    return groups, engine.seen, conversation_metrics(counts, mesh.ranks)


def batch_of(mesh, files, agent: str, kind: type[Recording] = Recording):
    """The samples, what the engine saw, and the packed batch."""
    from fivefold.rollout.packing import pack
    from fivefold.rollout.stats import BatchPlan, gather_stats

    groups, seen, metrics = sample(mesh, files, agent, kind=kind)
    plan = BatchPlan(1, 1, max_response_tokens=12)
    stats = gather_stats(groups, mesh.ranks, plan)
    return groups, seen, pack(groups, stats, mesh.ranks, plan), metrics


def assert_exact(groups, seen, batch) -> None:
    """Every turn that the engine read and sampled is in the batch that is trained on, bit for bit, and nothing else is."""
    seen = {(tuple(request.prompt_ids), tuple(completion.token_ids)): completion for request, completion in seen}
    at = 0
    for group in groups:
        for one in group.samples:
            context, mask = group.context_of(one), [False] * len(one.token_ids)
            for turn in one.turns:
                completion = seen.pop(
                    (tuple(context + one.token_ids[: turn.begin]), tuple(one.token_ids[turn.begin : turn.end]))
                )
                assert completion.logprobs == one.logprobs[turn.begin : turn.end]
                mask[turn.begin : turn.end] = [True] * (turn.end - turn.begin)
            assert mask_of(one) == mask
            end = at + len(context) + len(one.token_ids)
            assert batch.token_ids_T[at:end].tolist() == context + one.token_ids
            assert batch.loss_mask_T[at:end].tolist() == [False] * len(context) + mask
            of_turns = batch[Column.ROLLOUT_LOGPROBS][at:end][batch.loss_mask_T[at:end]]
            expected = [value for value, is_own in zip(one.logprobs, mask, strict=True) if is_own]
            assert of_turns.tolist() == torch.tensor(expected, dtype=torch.float32).tolist()
            at = end
    assert not seen and at == len(batch.token_ids_T)


@pytest.mark.parametrize(
    ("agent", "kind", "sequences"),
    [
        ("talks", Recording, 1),
        ("talks", Streamed, 1),
        ("team", Recording, 2),
        ("team", Streamed, 2),
        ("retries", Recording, 1),
    ],
)
def test_what_is_trained_is_what_the_engine_read_and_sampled_for_an_agent(cluster, files, agent, kind, sequences):
    ((groups, seen, batch, metrics),) = cluster.run(batch_of, "megatron:d1", files, agent, kind)
    for group in groups:
        assert len(group.samples) == 3 * sequences
        assert {one.end for one in group.samples} == {"done"}
        assert len({one.trajectory for one in group.samples}) == (3 if sequences > 1 else 1)
    assert_exact(groups, seen, batch)
    assert undocumented(metrics) == []
    if agent == "retries":
        assert metrics["endpoint/retries"] == len(seen) == 24


def program(mesh, files):
    return sample(mesh, files, f"{sys.executable} FILE")


def on_two(mesh, files):
    return sample(mesh, files, "talks", kind=Streamed, per_worker=2)


def test_a_command_workers_order_of_arrival_and_layouts_change_nothing(cluster, files):
    """The agents pause for times that nothing fixes."""
    ((undisturbed, _, _),) = cluster.run(sample, "megatron:d1", files, "talks")
    expected = keys(undisturbed)
    assert len({len(trajectory[6]) for trajectory in expected.values()}) > 1
    ((command, _, _),) = cluster.run(program, "megatron:d1", files)
    halves = cluster.run(on_two, "megatron:d2", files)
    for groups in (command, [group for half in halves for group in half[0]]):
        trajectories = keys(groups)
        assert trajectories.keys() == expected.keys()
        # A batch of other rows is padded in another way, which rounds log-probs.
        for key, one in trajectories.items():
            assert one[:2] + one[3:] == expected[key][:2] + expected[key][3:]
            assert one[2] == pytest.approx(expected[key][2], abs=1e-5)


def test_rewards_by_name_are_added_and_shown(cluster, files):
    ((groups, _, _),) = cluster.run(sample, "megatron:d1", files, "talks")
    for one in (one for group in groups for one in group.samples):
        assert one.environment_rewards.keys() == {"turns", "length"}
        assert one.reward == pytest.approx(sum(one.environment_rewards.values()))
        assert [turn.given for turn in one.turns[:-1]] == [0.0] * (len(one.turns) - 1)


def test_later_turns_of_an_agent_reach_the_engine_as_such(cluster, files):
    """Engines take later turns before first ones, which have computed nothing yet."""
    ((groups, seen, _),) = cluster.run(sample, "megatron:d1", files, "talks")
    numbers = sorted(turn.number for group in groups for one in group.samples for turn in one.turns)
    assert sorted(request.turn for request, _ in seen) == numbers and numbers[-1] > 0


def ends(mesh, files, agent: str, settings: dict, most: int = 200):
    try:
        groups, seen, metrics = sample(mesh, files, agent, max_failed=1.0, most=most, **settings)
    except RunError as error:
        return str(error)
    return {(one.end, one.reward_failed) for group in groups for one in group.samples}, metrics, len(seen)


@pytest.mark.parametrize(
    ("agent", "settings", "end", "failed"),
    [
        ("raises", {}, "agent", True),
        ("dies", {"per_worker": 3}, "agent", True),
        ("silent", {}, "agent", True),
        ("nothing", {}, "agent", True),
        ("infinite", {}, "agent", True),
        ("sleeps", {"trajectory_seconds": 1.0}, "time", False),
        ("endless", {"max_turns": 3}, "turns", False),
        ("endless", {"max_turns": 1000}, "context", False),
        ("long", {}, "context", True),
    ],
)
def test_each_end_of_an_agent_has_its_name_and_fails_its_trajectory_only(cluster, files, agent, settings, end, failed):
    ((endings, metrics, seen),) = cluster.run(ends, "megatron:d1", files, agent, settings, 60 if end == "context" else 200)
    assert endings == {(end, failed)}
    assert metrics.get("environment/failed", 0) == 12 * (end == "agent")
    if end == "turns":
        assert seen == 36


@pytest.mark.parametrize(
    ("agent", "end", "failed"),
    [
        ("recovers", "done", False),
        ("recovers_and_raises", "agent", True),
        ("recovers_and_dies", "agent", True),
        ("recovers_to_nan", "agent", True),
        ("gives_up", "context", False),
        ("gives_up_with_nan", "agent", True),
    ],
)
def test_a_refusal_is_the_end_of_an_agent_that_got_no_answer_after_it(cluster, files, agent, end, failed):
    ((endings, _, _),) = cluster.run(ends, "megatron:d1", files, agent, {})
    if agent == "recovers_and_dies":
        # A process may die before the answer that it got counts as read: the refusal is the end, and the sample fails.
        endings = {(end, failed) if case == ("context", True) else case for case in endings}
    assert endings == {(end, failed)}


def why(mesh, files, agent: str):
    try:
        sample(mesh, files, agent)
    except RunError as error:
        return str(error)


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ("raises", "KeyError: 'broken'"),
        ("dies", "the environment's process ended by SIGKILL"),
        ("silent", "the agent ended without an answer that it has read"),
        ("nothing", "an agent returns its reward, a finite number or several by name: got none"),
        ("infinite", "an agent returns a finite number, or several by name: got inf"),
        ("sh -c 'echo no; exit 3'", "the agent sh ended with exit code 3"),
        ("sh -c 'echo no'", "the agent's last line is its reward"),
        ("sh -c 'kill -9 $$'", "the agent sh ended with exit code -9"),
    ],
)
def test_a_failed_agent_names_its_reason(cluster, files, agent, words):
    (error,) = cluster.run(why, "megatron:d1", files, agent)
    assert "the reward of 12 of 12 samples failed" in error and words in error, error


ALONE = """
import sys, time
from fivefold.config.environment import EnvironmentConfig
from fivefold.environments.pool import EnvironmentPool

pool = EnvironmentPool(EnvironmentConfig(agent=sys.argv[1]))
pool.start()
place, _ = pool.reset({}, 0).result()
pool.run(place, "http://127.0.0.1:1/0/v1", "key", lambda: 1000.0).result()
"""


def is_alive(process: int) -> bool:
    """Whether a process runs; one that has ended may still wait to be reaped."""
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_an_agent_ends_with_its_trainer(tmp_path):
    (tmp_path / "alone.py").write_text(ALONE)
    agent = f"sh -c 'echo $$ > {tmp_path}/begun; mv {tmp_path}/begun {tmp_path}/pid; exec sleep 600'"
    trainer = subprocess.Popen([sys.executable, tmp_path / "alone.py", agent])
    while not (tmp_path / "pid").exists():
        assert trainer.poll() is None
        time.sleep(0.05)
    program = int((tmp_path / "pid").read_text())
    assert is_alive(program)
    trainer.kill()
    trainer.wait()
    end = time.monotonic() + 30
    while is_alive(program):
        assert time.monotonic() < end
        time.sleep(0.05)
