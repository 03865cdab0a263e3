"""Whole runs that sample ahead with real servers of vLLM: bounded age, every prompt once, whichever process is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.support.commands import Command, children_of, gone, is_free, wait_for
from tests.support.whole_runs import assert_same, left_in, make_model, metrics, write_run

pytestmark = pytest.mark.vllm

RUN = """
policy: {backend: "megatron:d1", tokens_per_micro_batch: 2048}
engine: {backend: "vllm:d1", mode: server, vllm: {kv_cache_memory_bytes: 67108864}}
algorithm: {name: grpo, group_size: 4, kl: {coef: 0.01}}
data: {val: [$ROOT/data/test.parquet], prompts_per_step: 8, max_response_tokens: 48}
eval: {max_prompts: 4}
trainer: {steps: 8, eval_every: 4, save_every: 2, keep: 9, device: cpu, logged_samples_per_step: 99}
"""
STEPS, PROMPTS = 8, 64
ENDLESS = [
    "data.max_response_tokens=120", "engine.sampling.ignore_eos=true", "engine.max_num_seqs=4", "policy.tokens_per_micro_batch=8192"
]  # fmt: skip
"""Responses of which so few are sampled at once that a step's take longer than the rest of it."""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("servers")
    make_model(root, hidden=64, heads=2, rows=PROMPTS)
    write_run(root, RUN)
    return root


def command(root: Path, name: str, *overrides: str) -> Command:
    return Command("train", root / "run.yaml", f"trainer.run_dir={root}/runs/{name}", *overrides)


def finished(root: Path, process: Command, name: str) -> list[dict[str, float]]:
    done = process.finish()
    assert done.returncode == 0, done.stdout + done.stderr
    return metrics(root, name)


def check_ages_and_prompts(root: Path, name: str, max_staleness: int, steps: int = STEPS) -> list[dict[str, float]]:
    """Nothing too old was used, and every prompt of the epoch exactly once."""
    rows = metrics(root, name)[1:]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        assert row["async/staleness_max"] <= max_staleness
        # One optimizer step a step: the ages by the tokens' versions and by steps are the same.
        assert row["rollout/staleness_max"] == row["async/staleness_max"]
    lines = (root / f"runs/{name}/samples.jsonl").read_text().splitlines()
    used = Counter(row["prompt_id"] for row in map(json.loads, lines) if row["kind"] == "train")
    assert set(used.values()) == {1} and len(used) == PROMPTS, used
    state = json.loads((root / f"runs/{name}/checkpoints/step-{steps:06d}/state.json").read_text())["rollouts"]
    assert (state["position"], state.get("unused", [])) == (PROMPTS, [])
    return rows


def test_nothing_ahead_with_a_server_is_the_synchronous_run(root):
    """Float32 on a CPU: what is drawn depends on the key of a request and on the weights alone."""
    runs = {name: command(root, name, *more) for name, more in {"base": [], "none": ["rollout.max_staleness=0"]}.items()}
    base, none = (finished(root, process, name) for name, process in runs.items())
    check_ages_and_prompts(root, "none", 0)
    assert_same([{k: v for k, v in row.items() if not k.startswith("async/")} for row in none], base)


@pytest.mark.slow
@pytest.mark.parametrize("interrupt", ["continue", "finish", "abort"])
def test_ages_stay_within_their_bound_and_each_prompt_is_used_once(root, interrupt):
    given = ["rollout.max_staleness=2", f"rollout.interrupt={interrupt}", *ENDLESS]
    finished(root, command(root, interrupt, *given), interrupt)
    rows = check_ages_and_prompts(root, interrupt, 2)
    assert max(row["async/staleness_max"] for row in rows) == 2
    aborted, reused = (sum(row[f"async/{name}_tokens"] for row in rows) for name in ("aborted", "reused"))
    assert (aborted > 0, reused > 0) == (interrupt == "abort", interrupt == "continue"), (aborted, reused)


@pytest.mark.slow
def test_a_killed_server_or_trainer_loses_no_prompt_and_uses_none_twice(root, temporary):
    process = command(root, "killed", "rollout.max_staleness=2")
    checkpoints = root / "runs/killed/checkpoints"
    wait_for((checkpoints / "step-000002").exists, process)
    everyone = children_of(process.pid)
    (api,) = [pid for pid in everyone if "fivefold.engines.vllm.serve" in psutil.Process(pid).cmdline()]
    os.kill(api, signal.SIGKILL)
    wait_for((checkpoints / "step-000004").exists, process)
    everyone = children_of(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: gone(everyone) and is_free(root / "runs/killed"))
    left = left_in(temporary)
    finished(root, command(root, "killed", "rollout.max_staleness=2"), "killed")
    check_ages_and_prompts(root, "killed", 2)
    assert left == left_in(temporary) == []


@pytest.mark.slow
def test_a_run_with_two_servers_asked_to_end_again_and_again_uses_every_prompt_once(root):
    """After a while of its own each time, so that requests are in flight, weights on their way, or a step is trained."""
    given = [
        "rollout.max_staleness=2", "engine.backend=vllm:d2", "policy.backend=megatron:d2", "trainer.save_every=0", *ENDLESS
    ]  # fmt: skip
    for step, seconds in ((1, 0.0), (3, 0.7), (5, 1.6)):
        process = command(root, "asked", *given)
        rows = root / "runs/asked/metrics.jsonl"
        wait_for(lambda step=step, rows=rows: rows.is_file() and f'"step": {step},' in rows.read_text(), process)
        time.sleep(seconds)
        everyone = children_of(process.pid)
        process.send_signal(signal.SIGTERM)
        done = process.finish()
        assert done.returncode == 128 + signal.SIGTERM, done.stdout + done.stderr
        wait_for(lambda everyone=everyone: gone(everyone))
    finished(root, command(root, "asked", *given), "asked")
    check_ages_and_prompts(root, "asked", 2)


@pytest.mark.slow
@pytest.mark.parametrize("tail", ["carry", "drop"])
def test_more_groups_than_needed_are_cut(root, tail):
    given = ["rollout.max_staleness=1", f"rollout.tail={tail}", "rollout.oversample=0.5", "trainer.steps=4"]
    rows = finished(root, command(root, tail, *given), tail)[1:]
    assert all(row["async/staleness_max"] <= 1 for row in rows)
    lines = (root / f"runs/{tail}/samples.jsonl").read_text().splitlines()
    used = Counter(row["prompt_id"] for row in map(json.loads, lines) if row["kind"] == "train")
    assert set(used.values()) == {1} and len(used) == 32


@pytest.mark.slow
def test_a_stalled_server_is_started_again(root):
    """Stopped and not ended: it holds its requests, or the new weights, and answers nothing."""
    process = command(root, "stalled", "rollout.max_staleness=2", "engine.stall_seconds=5")
    wait_for((root / "runs/stalled/checkpoints/step-000002").exists, process)
    for pid in children_of(process.pid):
        if (
            "fivefold.engines.vllm.serve" not in psutil.Process(pid).cmdline()
            and "vllm" in psutil.Process(pid).name().lower()
        ):
            os.kill(pid, signal.SIGSTOP)
    done = process.finish()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 servers of the engine ended or do not answer, and are started again" in done.stdout, done.stdout
    check_ages_and_prompts(root, "stalled", 2)


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [1, 4])
def test_two_ranks_and_two_engines_apart_raise_the_reward_ahead(root, max_staleness):
    """From random weights: the share of digits in what is sampled."""
    given = [
        "engine.backend=vllm:d2", "engine.placement=apart", "policy.backend=megatron:d2",
        f"rollout.max_staleness={max_staleness}", "trainer.steps=60", "trainer.epochs=8", "policy.optimizer.lr=2.0e-3",
        "algorithm.kl.coef=0", "algorithm.rollout_correction.old_logprobs_from=engine", "data.max_response_tokens=12",
        "trainer.eval_every=0", "trainer.save_every=0",
    ]  # fmt: skip
    rows = finished(root, command(root, f"learns-{max_staleness}", *given), f"learns-{max_staleness}")[1:]
    assert all(row["async/staleness_max"] <= max_staleness for row in rows)
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15, rewards


def servers_of(process) -> list[int]:
    pids = []
    for pid in children_of(process.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            pids += [pid] if "fivefold.engines.vllm.serve" in psutil.Process(pid).cmdline() else []
    return pids


@pytest.mark.slow
def test_servers_and_trainers_killed_in_turn_lose_no_prompt_and_use_none_twice(root):
    """Steps take two of 64 prompts each; the server is killed after two of the steps, the run after two others."""
    name, given = "turns", ["rollout.max_staleness=2", "data.prompts_per_step=2", "trainer.steps=32", "trainer.save_every=1"]
    checkpoints = root / f"runs/{name}/checkpoints"
    process = command(root, name, *given, "trainer.keep=99")
    for step in range(2, 6):
        wait_for((checkpoints / f"step-{step:06d}").exists, process)
        everyone = children_of(process.pid)
        if step % 2:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            wait_for(lambda everyone=everyone: gone(everyone))
            process = command(root, name, *given, "trainer.keep=99")
        else:
            # Steps continue with what was sampled ahead while the server that was killed before is started again.
            wait_for(lambda process=process: servers_of(process), process)
            os.kill(servers_of(process)[0], signal.SIGKILL)
    finished(root, process, name)
    check_ages_and_prompts(root, name, 2, steps=32)
