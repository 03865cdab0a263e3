"""Ranks that stop or stand still: who is named, when, and what is never taken for it."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest

from fivefold.distributed.pulse import Motion, Silence
from tests.support.commands import Command, children_of, gone, is_free, wait_for
from tests.support.whole_runs import make_model, write_run

RUN = """
policy: {backend: "megatron:d2", tokens_per_micro_batch: 24}
algorithm: {name: grpo, group_size: 4}
engine: {max_num_seqs: 2}
data: {prompts_per_step: 4, max_response_tokens: 8}
reward: {workers: 1}
trainer: {steps: 3, save_every: 1}
launch: {timeout_minutes: 600, silent_seconds: 5}
"""
ENDLESS = "trainer.steps=100000"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("silence")
    make_model(root, rows=16)
    write_run(root, RUN)
    return root


def _started(root: Path, run_dir: Path, *overrides: str, hook=None) -> tuple[Command, list[int]]:
    """A run that has saved once, and its ranks."""
    process = Command("train", root / "run.yaml", f"trainer.run_dir={run_dir}", ENDLESS, *overrides, hook=hook)
    wait_for((run_dir / "checkpoints/step-000001").exists, process)
    return process, sorted(child.pid for child in psutil.Process(process.pid).children())


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_asked", [False, True])
def test_a_stopped_rank_is_named_and_the_run_ends(root, tmp_path, rank, is_asked):
    process, ranks = _started(root, tmp_path / "run")
    everyone = children_of(process.pid)
    os.kill(ranks[rank], signal.SIGSTOP)
    if is_asked:
        process.send_signal(signal.SIGTERM)
    done = process.finish()
    assert done.returncode == 1, done.stderr
    headline = done.stderr.strip().splitlines()[0]
    assert headline.startswith(f"rank {rank} on {socket.gethostname()} has given no sign of life for ")
    assert "stopped by a signal, last seen in stage " in headline and "launch.silent_seconds: 5" in headline
    wait_for(lambda: gone(everyone) and is_free(tmp_path / "run"))


def test_a_stopped_rank_and_its_reward_process_end_with_a_killed_launcher(root, temporary):
    process, ranks = _started(root, temporary / "run", "launch.silent_seconds=600")
    everyone = children_of(process.pid)
    assert len(everyone) > len(ranks), "there are reward processes"
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)
    process.kill()
    process.wait()
    wait_for(lambda: gone(everyone))
    wait_for(lambda: not list(temporary.glob("fivefold-*")))


def rank_1_hangs_in_its_second_training():
    from fivefold.megatron.model import MegatronModel

    step = MegatronModel.train_step

    def following(self, *arguments):
        if self.version == 1 and os.environ["RANK"] == "1":
            signal.pause()
        return step(self, *arguments)

    MegatronModel.train_step = following


def test_a_rank_that_hangs_is_named_with_its_stack_while_others_wait_for_it(root, tmp_path):
    overrides = [f"trainer.run_dir={tmp_path}/run", ENDLESS]
    process = Command("train", root / "run.yaml", *overrides, hook=rank_1_hangs_in_its_second_training)
    done = process.finish()
    assert done.returncode == 1
    message = done.stderr.strip()
    assert message.startswith(f"rank 1 failed:\non {socket.gethostname()}: it has stood still for "), message
    assert "in stage train, collective " in message and "while the other ranks waited for it" in message
    assert "signal.pause()" in message


def rank_1_is_slow():
    """Three times as long as a rank may be silent: in a stage with a limit of its own, computing, and with Python's lock held."""
    from fivefold.megatron.model import MegatronModel
    from fivefold.rollout.sources import EngineRollouts

    step, original = MegatronModel.train_step, EngineRollouts.next

    def computing(self, *arguments):
        if self.version == 1 and os.environ["RANK"] == "1":
            begin, numbers = time.monotonic(), 10**7
            sum(range(numbers))
            # During a call of about seven seconds no other thread of Python runs. Other ranks would take 15 s for a loss.
            of_a_call = int(7 * numbers / (time.monotonic() - begin))
            while time.monotonic() < begin + 15:
                sum(range(of_a_call))
        return step(self, *arguments)

    def sampling(self, number):
        if number == 1 and os.environ["RANK"] == "1":
            time.sleep(15)
        return original(self, number)

    MegatronModel.train_step, EngineRollouts.next = computing, sampling


@pytest.mark.slow
def test_a_slow_rank_is_not_taken_for_one_that_hangs(root, tmp_path):
    done = Command("train", root / "run.yaml", f"trainer.run_dir={tmp_path}/run", hook=rank_1_is_slow).finish()
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_machine_that_was_suspended_has_not_been_silent():
    silence = Silence()
    assert silence.look("sign", 100.0) == 0.0
    assert silence.look("sign", 101.0) == 1.0
    assert silence.look("sign", 101.0 + 3600) == 3.0, "no look counts for more than two seconds"
    assert silence.look("another sign", 5000.0) == 0.0


def test_a_main_thread_that_does_nothing_does_not_move():
    motion, moved = Motion(computes_on_cpu=True), []

    def look() -> None:
        time.sleep(0.5)
        for place, is_watched in (((1, 0), True), ((1, 0), True), ((1, 0), False), ((1, 1), True), ((1, 1), True)):
            time.sleep(0.2)
            moved.append(motion.has_moved(place, is_watched))

    looking = threading.Thread(target=look)
    looking.start()
    looking.join()
    assert moved == [True, False, True, True, False], "a stage with a limit of its own, and the next item"
