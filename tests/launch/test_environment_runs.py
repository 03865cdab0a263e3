"""Whole runs of several turns: of one process and of two, with an evaluation, and until they have learned."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.commands import Command, children_of, fivefold, gone, is_free, wait_for, words_of
from tests.support.documented import undocumented
from tests.support.kills import ranks_of
from tests.support.whole_runs import assert_same, metrics
from tests.support.zygote import THREADS

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def made(root: Path, example: str, *words: str) -> Path:
    """A directory with the rows of an example, as its script makes them."""
    (root / "examples").symlink_to(EXAMPLES)
    subprocess.run([sys.executable, f"examples/{example}/rows.py", f"{example}/data", *words], cwd=root, check=True)
    return root


def run(root: Path, name: str, yaml: Path, *overrides: str) -> list[dict[str, float]]:
    """The metrics of a run of an example's file."""
    done = fivefold("train", yaml, f"trainer.run_dir={root}/runs/{name}", f"launch.threads={THREADS}", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics(root, name)
    assert undocumented(name for row in rows for name in row) == []
    return rows


@pytest.fixture(scope="module")
def guessing(tmp_path_factory) -> Path:
    root = made(tmp_path_factory.mktemp("guessing"), "guessing")
    data, words, model = root / "guessing/data/train.jsonl", root / "guessing/tokenizer", root / "guessing/model"
    for command in (
        ["train-tokenizer", "char", "--data", data, "--out", words],
        ["init-model", "qwen3", "--tokenizer", words, "--hidden", 64, "--layers", 2, "--ffn", 128, "--out", model],
    ):
        done = fivefold(*command)
        assert done.returncode == 0, done.stderr
    return root


def paths(root: Path) -> list[str]:
    """Overrides with the whole paths of the guessing game, for a command that is started elsewhere."""
    return [
        f"model.path={root}/guessing/model",
        f"data.train=[{root}/guessing/data/train.jsonl]",
        f"data.val=[{root}/guessing/data/test.jsonl]",
        f"environment.class={EXAMPLES}/guessing/envs.py:Guess",
    ]


SHORT = [
    "trainer.steps=2",
    "data.prompts_per_step=4",
    "algorithm.group_size=4",
    "eval.max_prompts=4",
    "trainer.eval_every=2",
]


def test_a_run_of_several_turns_is_the_same_on_two_ranks(guessing):
    alone = run(guessing, "alone", EXAMPLES / "guessing/grpo.yaml", *paths(guessing), *SHORT)
    pair = run(guessing, "pair", EXAMPLES / "guessing/grpo.yaml", *paths(guessing), *SHORT, "policy.backend=megatron:d2")
    of_time = ("environment/", "turns/seconds")
    assert_same(*[[{k: v for k, v in row.items() if not k.startswith(of_time)} for row in rows] for rows in (pair, alone)])
    last = alone[-1]
    assert last["turns/mean"] > 1 and last["turns/inserted_ends"] > 0
    assert last["reward/mean"] == pytest.approx(last["reward/environment"])
    assert 0 <= last["val/guess/mean@4"] <= 1
    shares = {name: value for name, value in last.items() if name.startswith("trajectory/end_") and value}
    ends = {name.removeprefix("trajectory/end_"): share for name, share in shares.items()}
    assert sum(ends.values()) == pytest.approx(1) and set(ends) <= {"done", "length", "turns"}


DROPPING = (
    "{% for m in messages %}{{ m.content.split('?')[-1] if m.role == 'assistant' and not loop.last else m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Drops what an earlier turn says up to a question mark, as models' templates drop thinking."""


def test_a_run_whose_template_drops_earlier_thinking_trains_every_sequence(guessing):
    again = [
        "environment.history=template",
        f"data.chat_template={json.dumps(DROPPING)}",
        "data.max_response_tokens=6",
        "data.max_total_tokens=40",
    ]
    yaml = EXAMPLES / "guessing/grpo.yaml"
    alone = run(guessing, "again", yaml, *paths(guessing), *SHORT, *again)
    pair = run(guessing, "again2", yaml, *paths(guessing), *SHORT, *again, "policy.backend=megatron:d2")
    of_time = ("environment/", "turns/seconds")
    assert_same(*[[{k: v for k, v in row.items() if not k.startswith(of_time)} for row in rows] for rows in (pair, alone)])
    for row in alone[1:]:
        assert row["trajectory/sequences"] == 1 + row["trajectory/breaks_template"] > 1
        assert row["turns/mean"] > row["trajectory/sequences"] and row["rollout/logprob_diff_max"] < 1e-4


@pytest.fixture(scope="module")
def wide(guessing) -> Path:
    """A model for vLLM, whose attention on CPUs has no heads narrower than 32."""
    done = fivefold("init-model", "qwen3", "--tokenizer", guessing / "guessing/tokenizer", "--hidden", 64, "--heads", 2,
                    "--layers", 2, "--ffn", 128, "--out", guessing / "wide")  # fmt: skip
    assert done.returncode == 0, done.stderr
    return guessing / "wide"


@pytest.mark.vllm
@pytest.mark.parametrize("mode", ["in_process", "server"])
def test_vllm_samples_every_turn_as_the_trainer_computes_it(guessing, wide, mode):
    engine = ["engine.backend=vllm:d1", f"engine.mode={mode}", "engine.vllm={kv_cache_memory_bytes: 67108864}"]
    yaml = EXAMPLES / "guessing/grpo.yaml"
    # With a reference model groups without variance are not left out of the comparison.
    rows = run(guessing, mode, yaml, *paths(guessing), f"model.path={wide}", *SHORT, *engine, "algorithm.kl.coef=0.01")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["turns/mean"] > 1 and row["rollout/logprob_diff_max"] < 1e-4 for row in rows[1:])
    assert rows[-1]["val/guess/mean@4"] >= 0


def test_dynamic_sampling_and_other_methods_take_trajectories(guessing):
    rows = run(guessing, "dapo", EXAMPLES / "guessing/grpo.yaml", *paths(guessing), *SHORT, "algorithm.name=dapo")
    assert rows[-1]["dynamic_sampling/prompts"] >= 4
    assert rows[-1]["turns/mean"] > 1


AHEAD = ["rollout.max_staleness=1", "trainer.steps=4", "trainer.save_every=1", "trainer.keep=9"]


def of_content(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Metrics that say what was sampled, and not when."""
    of_time = ("environment/", "turns/seconds", "async/trainer_wait", "async/complete", "engine/")
    return [{name: value for name, value in row.items() if not name.startswith(of_time)} for row in rows]


def test_trajectories_ahead_are_as_old_as_they_may_be_and_those_of_the_step_without(guessing):
    alone = run(guessing, "alone-too", EXAMPLES / "guessing/grpo.yaml", *paths(guessing), *SHORT)
    none = run(guessing, "none", EXAMPLES / "guessing/grpo.yaml", *paths(guessing), *SHORT, "rollout.max_staleness=0")
    rows = [{name: value for name, value in row.items() if not name.startswith("async/")} for row in of_content(none)]
    assert_same(rows, of_content(alone))
    ahead = run(guessing, "ahead", EXAMPLES / "guessing/grpo.yaml", *paths(guessing), *SHORT, *AHEAD)
    assert [row["async/staleness_max"] for row in ahead if "async/staleness_max" in row] == [0.0, 1.0, 1.0, 1.0]
    assert all(row["turns/mean"] > 1 for row in ahead if "turns/mean" in row)


SLOW = """
import asyncio, random, runpy, time
from fivefold import Step

class Slow:
    \"\"\"The guessing game with answers that take a while, so that a run can be killed in the middle.\"\"\"

    async def reset(self, task, seed):
        self.secret = random.Random(seed).randrange(10)
        return task["prompt"]

    async def step(self, message):
        await asyncio.sleep(0.1)
        guess = message["content"]
        is_right = guess == str(self.secret)
        return Step("" if is_right else ">", reward=float(is_right), done=is_right)

class Replayable(Slow):
    replayable = True

class Stated(Slow):
    def state(self):
        return {"secret": self.secret}

    def restore(self, state):
        self.secret = state["secret"]

def run(task, base_url, api_key):
    time.sleep(0.2)
    return runpy.run_path("$EXAMPLES/agent/agent.py")["run"](task, base_url, api_key)
"""


@pytest.fixture(scope="module")
def slow(guessing) -> Path:
    """A file with environments and an agent that take a while."""
    (guessing / "slow.py").write_text(SLOW.replace("$EXAMPLES", str(EXAMPLES)))
    return guessing / "slow.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "step", "before", "layout"),
    [
        ("Slow", 1, "d1", "d2"),
        ("Slow", 3, "d1", "d1"),
        ("Replayable", 2, "d1", "d1"),
        ("Stated", 1, "d1", "d1"),
        ("Stated", 3, "d1", "d2"),
        ("Slow", 2, "d2", "d2"),
        ("Replayable", 1, "d2", "d1"),
        ("Stated", 2, "d2", "d2"),
    ],
)
def test_a_killed_run_with_trajectories_ahead_resumes_as_if_undisturbed(guessing, slow, name, step, before, layout):
    """Killed after one of its checkpoints, on one rank or two, and resumed on one or two."""
    overrides = [*paths(guessing)[:3], f"environment.class={slow}:{name}"]
    kills = [(before, f"step-{step:06d}", 0.0)]
    resumed_equals_whole(guessing, EXAMPLES / "guessing/grpo.yaml", overrides, kills, layout)


@pytest.mark.slow
def test_two_ranks_of_which_one_is_killed_at_any_stage_resume_as_if_undisturbed(guessing, slow):
    """One rank alone is killed while a checkpoint is written, right after one, and in the middle of a step."""
    overrides = [*paths(guessing)[:3], f"environment.class={slow}:Stated"]
    kills = [("d2", "*step-000001*", 0.0), ("d2", "step-000002", 0.0), ("d2", "step-000004", 0.3)]
    resumed_equals_whole(guessing, EXAMPLES / "guessing/grpo.yaml", overrides, kills, "d1", of_rank=True)


def resumed_equals_whole(
    root: Path, yaml: Path, overrides: list[str], kills: list[tuple[str, str, float]], layout: str, of_rank: bool = False
) -> None:
    """Kill a run that samples ahead, start it again until it is not killed any more, and compare it with a whole run.

    `kills`: layout, the checkpoint that must be there, and seconds after it; `layout`: of the start that reaches the end;
    `of_rank`: the last rank is killed, and not the launcher.
    """
    given = [*overrides, *SHORT, *AHEAD, "trainer.steps=5", "trainer.resume=auto"]
    name = "-".join([overrides[-1].rpartition(":")[2], *(f"{place}{step[-1]}" for place, step, _ in kills), layout])
    expected = run(root, f"whole-{name}", yaml, *given)
    run_dir = root / f"runs/killed-{name}"
    given += [f"trainer.run_dir={run_dir}", f"launch.threads={THREADS}"]
    for on, checkpoint, seconds in kills:
        process = Command("train", yaml, *given, f"policy.backend=megatron:{on}")
        wait_for(lambda pattern=checkpoint: any((run_dir / "checkpoints").glob(pattern)), process)
        time.sleep(seconds)
        everyone = children_of(process.pid)
        os.kill(max(rank.pid for rank in ranks_of(process)) if of_rank else process.pid, signal.SIGKILL)
        assert process.wait() != 0
        wait_for(lambda family=everyone: gone(family) and is_free(run_dir))
        assert not (run_dir / "checkpoints/step-000005").exists(), "the run must be killed before its end"
    done = fivefold("train", yaml, *given, f"policy.backend=megatron:{layout}")
    assert done.returncode == 0 and "resumed after step" in done.stdout, done.stdout + done.stderr
    assert_same(of_content(metrics(root, run_dir.name)), of_content(expected))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["class", "agent"])
def test_a_killed_environment_process_costs_the_trajectories_of_it_alone(guessing, slow, kind):
    """Four of sixteen trajectories are in the process; the others, and the steps that follow, are those of a whole run."""
    name = {"class": "Stated", "agent": "run"}[kind]
    given = [
        *paths(guessing)[:3], f"environment.{kind}={slow}:{name}", *SHORT,
        "trainer.eval_before_train=false", "environment.per_worker=4", "reward.max_failed=0.5", "policy.optimizer.lr=0",
        "trainer.logged_samples_per_step=all",
    ]  # fmt: skip
    yaml = EXAMPLES / {"class": "guessing/grpo.yaml", "agent": "agent/grpo.yaml"}[kind]
    run(guessing, f"whole-{kind}", yaml, *given)
    run_dir = guessing / f"runs/worker-{kind}"
    process = Command("train", yaml, *given, f"launch.threads={THREADS}", f"trainer.run_dir={run_dir}")
    wait_for(lambda: len(workers_of(process.pid)) == 4, process)
    time.sleep(0.2)
    os.kill(workers_of(process.pid)[0], signal.SIGKILL)
    done = process.finish()
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = metrics(guessing, run_dir.name)
    end = {"class": "trajectory/end_environment", "agent": "trajectory/end_agent"}[kind]
    assert 0 < first[end] <= 4 / 16 and second[end] == 0
    # Rows without reward are those that failed; the weights stay as they are, so the others are the same.
    assert set(scored(run_dir)) <= set(scored(guessing / f"runs/whole-{kind}"))
    assert len(scored(run_dir)) == 32 - round(16 * first[end])


def workers_of(pid: int) -> list[int]:
    """Processes of a run in which environments are."""
    return [child for child in children_of(pid) if any("environments/worker.py" in word for word in words_of(child))]


def scored(run_dir: Path) -> list[tuple]:
    """Step, prompt, tokens and reward of each trajectory that has a reward, each once."""
    rows = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["kind"] == "train" and row["reward"] is not None]
    samples = [(row["step"], row["prompt_id"], row["sample"], row["response"], row["reward"]) for row in trained]
    assert len({row[:3] for row in samples}) == len(samples)
    return samples


@pytest.mark.vllm
@pytest.mark.slow
def test_servers_that_are_killed_under_several_turns_change_no_metric(guessing, wide):
    """A turn that was under way is sampled again with its own draws, and its trajectory continues."""
    given = [
        *paths(guessing), f"model.path={wide}", *SHORT, "trainer.steps=3", "algorithm.kl.coef=0.01", "engine.backend=vllm:d1",
        "engine.mode=server", "engine.vllm={kv_cache_memory_bytes: 67108864}",
    ]  # fmt: skip
    yaml = EXAMPLES / "guessing/grpo.yaml"
    expected = run(guessing, "whole-servers", yaml, *given)
    run_dir = guessing / "runs/killed-servers"
    process = Command("train", yaml, *given, f"launch.threads={THREADS}", f"trainer.run_dir={run_dir}")
    rows, killed = run_dir / "metrics.jsonl", set()
    for step in (0, 1):
        wait_for(lambda step=step: rows.is_file() and f'"step": {step},' in rows.read_text(), process)
        wait_for(lambda: set(servers_of(process.pid)) - killed, process)
        (server,) = set(servers_of(process.pid)) - killed
        os.kill(server, signal.SIGKILL)
        killed.add(server)
    done = process.finish()
    assert done.returncode == 0 and len(killed) == 2, done.stdout + done.stderr
    assert_same(of_content(metrics(guessing, run_dir.name)), of_content(expected))


@pytest.mark.vllm
@pytest.mark.slow
def test_killed_servers_workers_and_runs_lose_no_trajectory_and_use_none_twice(guessing, wide, slow):
    """A run samples ahead with a server of vLLM, and its weights stay as they are. So every trajectory is that of a run that
    nothing touched, except at most four in the process of environments that is killed."""
    given = [
        *paths(guessing)[:3], f"environment.class={slow}:Stated", f"model.path={wide}", *SHORT, *AHEAD, "trainer.steps=6",
        "trainer.eval_before_train=false", "trainer.resume=auto", "policy.optimizer.lr=0",
        "trainer.logged_samples_per_step=all", "environment.per_worker=4", "reward.max_failed=0.5", "rollout.interrupt=finish",
        "engine.backend=vllm:d1", "engine.mode=server", "engine.vllm={kv_cache_memory_bytes: 67108864}", "engine.sleep=false",
    ]  # fmt: skip
    yaml, run_dir = EXAMPLES / "guessing/grpo.yaml", guessing / "runs/ahead-killed"
    run(guessing, "ahead-whole", yaml, *given)
    given += [f"trainer.run_dir={run_dir}", f"launch.threads={THREADS}"]
    process = Command("train", yaml, *given)
    for step, victims in enumerate((servers_of, workers_of, lambda pid: [pid]), start=1):
        wait_for((run_dir / f"checkpoints/step-{step:06d}").exists, process)
        wait_for(lambda victims=victims: victims(process.pid), process)
        everyone = children_of(process.pid)
        os.kill(victims(process.pid)[0], signal.SIGKILL)
    assert process.wait() != 0
    wait_for(lambda: gone(everyone) and is_free(run_dir))
    assert not (run_dir / "checkpoints/step-000006").exists(), "the run must be killed before its end"
    done = fivefold("train", yaml, *given)
    assert done.returncode == 0 and "resumed after step" in done.stdout, done.stdout + done.stderr
    whole, killed = (set(scored(guessing / f"runs/{name}")) for name in ("ahead-whole", "ahead-killed"))
    assert len(whole) == 6 * 16 and killed <= whole and len(whole - killed) <= 4
    rows = metrics(guessing, run_dir.name)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and max(row["async/staleness_max"] for row in rows) == 1
    assert sum(row["trajectory/end_environment"] for row in rows) == pytest.approx(len(whole - killed) / 16)


CLIENT = """
import random
import openai

async def run(task, base_url, api_key):
    secret = str(random.Random(task["seed"]).randrange(10))
    messages = [{"role": "user", "content": task["prompt"]}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for turn in range(4):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            guess = answer.choices[0].message.content or ""
            if guess == secret:
                return 1.0
            messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": ">"}]
    return 0.0
"""


@pytest.mark.vllm
@pytest.mark.slow
def test_an_agent_with_openai_s_client_samples_from_a_server_of_vllm_what_is_trained(guessing, wide):
    """Every turn's log-probs are the trainer's, and each trajectory is one sequence."""
    pytest.importorskip("openai")
    (guessing / "client.py").write_text(CLIENT)
    given = [
        *paths(guessing)[:3], f"environment.agent={guessing}/client.py:run", f"model.path={wide}", *SHORT,
        "algorithm.kl.coef=0.01", "engine.backend=vllm:d1", "engine.mode=server",
        "engine.vllm={kv_cache_memory_bytes: 67108864}", "environment.reset_seconds=600",
    ]  # fmt: skip
    rows = run(guessing, "openai", EXAMPLES / "agent/grpo.yaml", *given)
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["turns/mean"] > 1 and row["rollout/logprob_diff_max"] < 1e-4
        assert row["trajectory/sequences"] == 1 and row["trajectory/end_agent"] == 0 == row["endpoint/overridden"]


def servers_of(pid: int) -> list[int]:
    return [child for child in children_of(pid) if "fivefold.engines.vllm.serve" in words_of(child)]


def test_a_run_that_fails_in_its_environment_ends_with_the_reason(guessing):
    (guessing / "broken.py").write_text(
        "class Game:\n    def reset(self, task, seed):\n        raise KeyError('lost')\n    def step(self, m): ...\n"
    )
    done = fivefold("train", EXAMPLES / "guessing/grpo.yaml", *paths(guessing)[:3], *SHORT, "trainer.eval_before_train=false",
                    f"environment.class={guessing}/broken.py:Game", f"trainer.run_dir={guessing}/runs/broken")  # fmt: skip
    assert done.returncode != 0
    assert "the reward of 16 of 16 samples failed" in done.stdout + done.stderr
    assert "KeyError: 'lost'" in done.stdout + done.stderr


@pytest.mark.learning
def test_a_model_learns_the_guessing_game(guessing):
    rows = run(guessing, "learns", EXAMPLES / "guessing/grpo.yaml", *paths(guessing))
    right = [row["val/guess/mean@4"] for row in rows if "val/guess/mean@4" in row]
    assert right[0] < 0.3 and right[-1] > 0.8
    assert json.loads((guessing / "runs/learns/status.json").read_text())["state"] == "finished"


@pytest.mark.learning
def test_a_model_learns_to_walk_over_the_frozen_lake(tmp_path):
    place = made(tmp_path, "frozenlake") / "frozenlake"
    for command in (
        ["train-tokenizer", "char", "--data", place / "data/train.jsonl", "--out", place / "words"],
        ["init-model", "qwen3", "--tokenizer", place / "words", "--hidden", 64, "--layers", 2, "--ffn", 128, "--out", place / "model"],
    ):  # fmt: skip
        done = fivefold(*command)
        assert done.returncode == 0, done.stderr
    rows = run(
        tmp_path,
        "lake",
        EXAMPLES / "frozenlake/grpo.yaml",
        f"model.path={place}/model",
        f"data.train=[{place}/data/train.jsonl]",
        f"data.val=[{place}/data/test.jsonl]",
        f"environment.class={EXAMPLES}/frozenlake/envs.py:FrozenLake",
    )
    right = [row["val/lake/mean@4"] for row in rows if "val/lake/mean@4" in row]
    assert right[0] < 0.3 and right[-1] > 0.8


@pytest.mark.learning
def test_a_model_learns_to_call_a_calculator(tmp_path):
    root = made(tmp_path, "calculator", "0")
    place = root / "calculator"
    for command in (
        ["train-tokenizer", "bpe", "--vocab", 400, "--data", place / "data/worked.jsonl", "--out", place / "words"],
        ["init-model", "qwen3", "--tokenizer", place / "words", "--hidden", 96, "--layers", 2, "--ffn", 192, "--out", place / "model"],
    ):  # fmt: skip
        done = fivefold(*command)
        assert done.returncode == 0, done.stderr
    tools = EXAMPLES / "calculator/tools.py"
    common = [
        f"data.val=[{place}/data/test.jsonl]",
        f"environment.tools=[{tools}:multiply]",
        f'reward={{"functions": {{"{tools}:right": 1.0}}}}',
    ]
    run(
        root,
        "sft",
        EXAMPLES / "calculator/sft.yaml",
        f"model.path={place}/model",
        f"data.train=[{place}/data/worked.jsonl]",
        *common,
    )
    latest = (root / "runs/sft/checkpoints/latest").read_text().strip()
    assert fivefold("export", root / "runs/sft/checkpoints" / latest, place / "warm").returncode == 0
    rows = run(
        root,
        "grpo",
        EXAMPLES / "calculator/grpo.yaml",
        f"model.path={place}/warm",
        f"data.train=[{place}/data/train.jsonl]",
        *common,
    )
    right = [row["val/products/mean@2"] for row in rows if "val/products/mean@2" in row]
    # The warm start ends at the first of its evaluations above 0.15: 20 steps can bring it from below to 0.4.
    assert right[0] < 0.5 and right[-1] > 0.8


def agent(root: Path) -> list[str]:
    """Overrides with which an agent plays the guessing game of `root`."""
    return [*paths(root)[:3], f"environment.agent={EXAMPLES}/agent/agent.py:run"]


def test_a_run_of_an_agent_is_the_same_on_two_ranks(guessing):
    alone = run(guessing, "agent", EXAMPLES / "agent/grpo.yaml", *agent(guessing), *SHORT)
    pair = run(guessing, "agents", EXAMPLES / "agent/grpo.yaml", *agent(guessing), *SHORT, "policy.backend=megatron:d2")
    of_time = ("environment/", "turns/seconds")
    assert_same(*[[{k: v for k, v in row.items() if not k.startswith(of_time)} for row in rows] for rows in (pair, alone)])
    last = alone[-1]
    assert last["turns/mean"] > 1 and last["reward/mean"] == pytest.approx(last["reward/environment"])
    assert last["trajectory/sequences"] == 1 and last["trajectory/end_done"] == 1
    assert last["endpoint/retries"] == last["endpoint/unread"] == last["endpoint/overridden"] == 0


@pytest.mark.slow
def test_a_killed_run_of_agents_ahead_resumes_as_if_undisturbed(guessing, slow):
    """Agents that were not at their end begin again, and get the same answers."""
    overrides = [*paths(guessing)[:3], f"environment.agent={slow}:run"]
    resumed_equals_whole(guessing, EXAMPLES / "agent/grpo.yaml", overrides, [("d1", "step-000002", 0.0)], "d2")


@pytest.mark.learning
def test_a_model_learns_from_what_an_agent_does_with_it(guessing):
    rows = run(guessing, "agent-learns", EXAMPLES / "agent/grpo.yaml", *agent(guessing))
    right = [row["val/guess/mean@4"] for row in rows if "val/guess/mean@4" in row]
    assert right[0] < 0.3 and right[-1] > 0.8
