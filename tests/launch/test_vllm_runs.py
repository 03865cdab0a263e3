"""Whole runs from the command line that sample with vLLM in the policy's ranks."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests.support.commands import Command, children_of, fivefold, gone, is_free, wait_for
from tests.support.engines import named_blocks
from tests.support.whole_runs import assert_same, left_in, make_model, metrics, write_run

pytestmark = pytest.mark.vllm

RUN = """
policy: {backend: "megatron:t2", tokens_per_micro_batch: 512}
engine: {backend: "vllm:d1t2", vllm: {kv_cache_memory_bytes: 67108864}}
algorithm: {name: grpo, group_size: 4, updates_per_step: 2, kl: {coef: 0.01}}
data: {val: [$ROOT/data/test.parquet], prompts_per_step: 8, max_response_tokens: 12}
eval: {samples: 2, max_prompts: 6}
trainer: {steps: 4, eval_every: 2, save_every: 2, keep: 9, device: cpu}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("vllm")
    # vLLM's attention on CPUs has no heads narrower than 32.
    make_model(root, hidden=64, heads=2)
    write_run(root, RUN)
    return root


def train(root: Path, name: str, *overrides: str):
    return fivefold("train", root / "run.yaml", f"trainer.run_dir={root}/runs/{name}", *overrides)


@pytest.fixture(scope="module")
def base(root):
    done = train(root, "base")
    assert done.returncode == 0, done.stdout + done.stderr
    return metrics(root, "base")


def test_a_run_samples_with_vllm_what_the_trainer_computes(root, base):
    assert [row["step"] for row in base] == [0, 1, 2, 3, 4]
    for row in base[1:]:
        assert row["rollout/logprob_diff_max"] < 1e-4
        assert row["response/length_mean"] > 1


@pytest.mark.slow
def test_a_run_on_two_replicas_of_the_engine_is_the_same(root, base):
    """What is drawn depends on the key of a request, not on who samples it: float32 breaks no tie the other way here."""
    done = train(root, "replicas", "engine.backend=vllm:d2", "policy.backend=megatron:d2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same(metrics(root, "replicas"), base)


def test_a_run_killed_and_resumed_has_the_same_metrics_and_leaves_nothing_over(root, base, temporary):
    process = Command("train", root / "run.yaml", f"trainer.run_dir={root}/runs/killed")
    checkpoints = root / "runs/killed/checkpoints"
    wait_for((checkpoints / "step-000002").exists, process)
    everyone = children_of(process.pid)
    blocks = named_blocks(everyone)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: gone(everyone) and not any(block.exists() for block in blocks) and is_free(root / "runs/killed"))
    left = left_in(temporary)
    done = train(root, "killed")
    assert done.returncode == 0, done.stderr
    assert "resumed after step" in done.stdout
    assert_same(metrics(root, "killed"), base)
    assert left == left_in(temporary) == []


STEP_SECONDS = 5


def slow_steps_of_vllm_in_step_2():
    """A minute for responses of twelve tokens, none of which ends before the others."""
    from vllm.v1.engine.llm_engine import LLMEngine

    from fivefold.rollout.sources import EngineRollouts

    following, step, mark = EngineRollouts.next, LLMEngine.step, Path(os.environ["FIVEFOLD_TEST_MARK"])

    def marked(self, number):
        if number == 1:
            mark.touch()
        return following(self, number)

    def slowly(self):
        time.sleep(STEP_SECONDS if mark.exists() else 0)
        return step(self)

    EngineRollouts.next, LLMEngine.step = marked, slowly


@pytest.mark.slow
def test_sigterm_ends_the_rollout_between_two_steps_of_vllm(root, monkeypatch, tmp_path):
    """On tensor-parallel ranks, which have to leave it between the same two; the run continues as if nothing had been."""
    monkeypatch.setenv("FIVEFOLD_TEST_MARK", str(tmp_path / "slow"))
    given = ["engine.sampling.min_tokens=12", "trainer.steps=2", "trainer.eval_every=0", "trainer.save_every=0"]
    given.append("trainer.eval_before_train=false")
    whole = train(root, "terminated-whole", *given)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    run = root / "runs/terminated"
    process = Command("train", root / "run.yaml", f"trainer.run_dir={run}", *given, hook=slow_steps_of_vllm_in_step_2)
    wait_for((tmp_path / "slow").exists, process)
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    done = process.finish()
    seconds = time.monotonic() - begin
    (tmp_path / "slow").unlink()
    assert done.returncode == 128 + signal.SIGTERM, done.stdout + done.stderr
    assert "in step 2, which is repeated on resume" in done.stdout
    assert seconds < 30, f"{seconds} s, where the rollout takes {12 * STEP_SECONDS}"
    resumed = train(root, "terminated", *given)
    assert resumed.returncode == 0 and "resumed after step 1 " in resumed.stdout, resumed.stdout + resumed.stderr
    assert_same(metrics(root, "terminated"), metrics(root, "terminated-whole"))


@pytest.mark.slow
def test_a_run_whose_server_is_killed_has_the_same_metrics_as_one_in_process(root, base):
    """The one server there is, killed by SIGKILL between two steps or in one: it is started again, nothing counts twice."""
    process = Command("train", root / "run.yaml", f"trainer.run_dir={root}/runs/server", "engine.mode=server")
    wait_for((root / "runs/server/checkpoints/step-000002").exists, process)
    everyone = children_of(process.pid)
    (api,) = [pid for pid in everyone if "fivefold.engines.vllm.serve" in psutil.Process(pid).cmdline()]
    blocks = named_blocks(everyone)
    os.kill(api, signal.SIGKILL)
    done = process.finish()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 servers of the engine ended or do not answer, and are started again" in done.stdout
    assert_same(metrics(root, "server"), base)
    # Python's tracker removes what a killed process had under a name, a moment later.
    wait_for(lambda: gone(everyone) and not any(block.exists() for block in blocks))


APART = ["policy.backend=megatron:d2", "engine.placement=apart", "engine.backend=vllm:d2"]


@pytest.mark.slow
def test_a_run_whose_servers_are_apart_has_the_same_metrics_although_one_is_killed(root, base):
    """Two ranks, two servers next to them; the summary says who is where, and nothing stays."""
    process = Command("train", root / "run.yaml", f"trainer.run_dir={root}/runs/apart", *APART)
    wait_for((root / "runs/apart/checkpoints/step-000002").exists, process)
    everyone = children_of(process.pid)
    apis = [pid for pid in everyone if "fivefold.engines.vllm.serve" in psutil.Process(pid).cmdline()]
    assert len(apis) == 2
    blocks = named_blocks(everyone)
    os.kill(apis[0], signal.SIGKILL)
    done = process.finish()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "servers of the engine ended or do not answer, and are started again" in done.stdout
    assert "server 1 of vllm:d2t1p1, started by rank 1" in done.stdout
    assert_same(metrics(root, "apart"), base)
    wait_for(lambda: gone(everyone) and not any(block.exists() for block in blocks))


@pytest.mark.slow
def test_a_run_with_one_string_for_its_layouts_is_the_same(root, base):
    """One server of two workers for two ranks, and weights that are gathered before they are sent."""
    run = yaml.safe_load((root / "run.yaml").read_text())
    del run["policy"]["backend"], run["engine"]["backend"]
    (root / "allocated.yaml").write_text(yaml.safe_dump(run))
    given = ["launch.allocation=vllm:d1t2+megatron:t2", "engine.staged_sync=true"]
    done = fivefold("train", root / "allocated.yaml", f"trainer.run_dir={root}/runs/allocated", *given)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same(metrics(root, "allocated"), base)


@pytest.mark.slow
def test_a_server_that_cannot_start_ends_the_run_with_its_reason(root):
    done = train(root, "no-server", "engine.vllm.max_num_batched_tokens=7", "engine.mode=server")
    assert done.returncode != 0
    assert "server did not start" in done.stderr and "max_num_batched_tokens" in done.stderr, done.stderr[-2000:]


@pytest.mark.parametrize("mode", ["in_process", pytest.param("server", marks=pytest.mark.slow)])
def test_a_stop_string_ends_responses(root, mode):
    """The one thing that an engine needs a tokenizer for."""
    done = train(
        root,
        f"stops-{mode}",
        f"engine.mode={mode}",
        "trainer.steps=1",
        'engine.sampling.stop=["1","2","3","4","5"]',
        "engine.sampling.ignore_eos=true",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (root / f"runs/stops-{mode}/samples.jsonl").read_text().splitlines()]
    texts = [row["response"] for row in rows]
    assert any(text[-1:] in "12345" for text in texts if text)
    assert not any(digit in text[:-1] for text in texts for digit in "12345")


def test_grpo_with_vllm_raises_the_reward(root):
    """From random weights: the share of digits in what is sampled."""
    done = train(
        root, "learns", "trainer.steps=40", "trainer.eval_every=0", "trainer.save_every=0", "policy.optimizer.lr=3.0e-3",
        "algorithm.kl.coef=0",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rewards = [row["reward/mean"] for row in metrics(root, "learns") if row["step"] > 0]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2, rewards


@pytest.mark.slow
def test_an_engine_that_cannot_start_ends_the_run_with_its_reason(root):
    done = train(root, "no-start", "engine.vllm.max_num_batched_tokens=7", "engine.vllm.enable_chunked_prefill=false")
    assert done.returncode != 0
    assert "vLLM did not start" in done.stderr and "max_num_batched_tokens" in done.stderr, done.stderr[-2000:]


def fail_at_the_second_sampling() -> None:
    from fivefold.engines.vllm.engine import VLLMEngine

    generate, calls = VLLMEngine.generate, []

    def second_fails(self, requests):
        calls.append(1)
        if len(calls) > 3 and os.environ["RANK"] == "1":
            raise RuntimeError("planted in the engine of rank 1")
        return generate(self, requests)

    VLLMEngine.generate = second_fails


def test_an_engine_that_fails_in_one_rank_ends_the_run_with_its_error(root):
    process = Command("train", root / "run.yaml", f"trainer.run_dir={root}/runs/fails", hook=fail_at_the_second_sampling)
    done = process.finish()
    assert done.returncode != 0
    assert "planted in the engine of rank 1" in done.stderr, done.stderr[-2000:]
