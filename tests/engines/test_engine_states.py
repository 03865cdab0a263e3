"""What brings an engine of servers from one state to another, with servers of this process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from fivefold.engines.absent import AbsentEngine
from fivefold.engines.servers.server import ServerLostError
from fivefold.engines.servers.server_engine import ServerEngine
from fivefold.engines.transformers import TransformersEngine
from fivefold.engines.weight_sync import weight_sync
from fivefold.interfaces import EngineState
from fivefold.types import Sampling
from tests.engines.test_vllm_engine import TOKENIZER
from tests.support.engines import requests
from tests.support.tiny_models import load_tensors

WALK = [
    ("wake", "absent"),
    ("restart", "absent"),
    ("weights", "ready"),
    ("weights", "ready"),
    ("restart", "ready"),
    ("sleep", "asleep"),
    ("sleep", "asleep"),
    ("restart", "asleep"),
    ("wake", "absent"),
    ("sleep", "asleep"),
    ("wake", "absent"),
    ("weights", "ready"),
    ("a server ends", "ready"),
    ("restart", "absent"),
    ("weights", "ready"),
    ("weights", "ready"),
    ("all servers end", "lost"),
    ("wake", "lost"),
    ("restart", "absent"),
    ("a server ends in an update", "lost"),
    ("restart", "absent"),
    ("weights", "ready"),
    ("weights", "ready"),
    ("a server ends", "ready"),
    ("sleep", "asleep"),
    ("restart", "asleep"),
    ("wake", "absent"),
    ("weights", "ready"),
]
"""What happens to an engine, in order -> its state after that."""


class Process:
    """A server that runs until `end`; it takes weights, and samples nothing."""

    log = Path("log")

    def __init__(self) -> None:
        self.has_ended, self.starts = True, 0

    @property
    def address(self) -> str:
        return f"{id(self)}/{self.starts}"

    def start(self) -> None:
        self.has_ended, self.starts = False, self.starts + 1

    def wait(self) -> None: ...

    def end(self) -> None:
        self.has_ended = True

    close = end

    def last_words(self) -> str:
        return "the last words"


class Client:
    def __init__(self, process: Process) -> None:
        self.process, self.address, self.names_versions = process, process.address, True

    def __getattr__(self, name: str):
        def call(*arguments):
            if self.process.has_ended:
                raise ServerLostError("it has ended")
            return []

        return call

    async def generate(self, *asked):
        while not self.process.has_ended:
            await asyncio.sleep(0.01)
        raise ServerLostError("it has ended")
        yield


def engine_of(mesh, directory: Path, messages: list[str]) -> tuple[ServerEngine, list[Process]]:
    processes = [Process(), Process()]

    def connect(address: str) -> Client:
        return Client(next(process for process in processes if process.address == address))

    engine = ServerEngine(
        directory, mesh.ranks, mesh.device, connect, messages.append, processes=dict(enumerate(processes)), window=8,
        bucket_bytes=1 << 20, verify_every=0, can_sleep=True,
    )  # fmt: skip
    return engine, processes


def walked(mesh, directory: Path):
    messages: list[str] = []
    engine, processes = engine_of(mesh, directory, messages)
    tensors, states = load_tensors(directory), [engine.state.value]

    def ending(count: int):
        for process in processes[:count]:
            process.end()
        yield from tensors.items()

    def end(count: int) -> None:
        stream = engine.stream()
        stream.submit(requests(8, Sampling(max_tokens=4)))
        list(ending(count))
        assert stream.take(5.0 if count == 2 else 0.2) is None
        stream.close()
        engine.look_after()

    verbs = {
        "weights": lambda: engine.update_weights(iter(tensors.items()), 7),
        "a server ends": lambda: end(1),
        "all servers end": lambda: end(2),
        "a server ends in an update": lambda: engine.update_weights(ending(1), 7),
        **{name: getattr(engine, name) for name in ("sleep", "wake", "restart")},
    }
    for verb, _ in WALK:
        verbs[verb]()
        states.append(engine.state.value)
    engine.close()
    return states, messages


def test_an_engine_of_servers_passes_through_its_states(cluster, models):
    ((states, messages),) = cluster.run(walked, "megatron:d1", models("qwen3"))
    assert states == ["absent", *(state for _, state in WALK)]
    assert [line.split(":")[0] for line in messages if "started again" in line] == [
        f"{count} of 2 servers of the engine ended or do not answer, and are started again" for count in (1, 2, 1, 1)
    ]


class Policy:
    def __init__(self, version: int, tensors: dict[str, torch.Tensor]) -> None:
        self.version, self._tensors = version, tensors

    def weights(self):
        return iter(self._tensors.items())


def synced(mesh, directory: Path):
    """The state before a weight sync, whether weights were sent, and the state and the version after it."""
    engine, processes = engine_of(mesh, directory, [])
    tensors, syncs = load_tensors(directory), []

    def sync(version: int) -> None:
        before = engine.state.value
        syncs.append((before, weight_sync(Policy(version, tensors), engine), engine.state.value, engine.version))

    sync(0)
    sync(0)
    sync(2)
    engine.sleep()
    sync(2)
    for process in processes:
        process.end()
    sync(3)
    completions = engine.generate(requests(2, Sampling(max_tokens=4)))
    for process in processes:
        process.end()
    reasons = {completion.finish_reason for completion in completions}
    sync(3)
    engine.close()
    return syncs, reasons


def test_a_weight_sync_makes_an_engine_ready_from_every_state(cluster, models):
    ((syncs, reasons),) = cluster.run(synced, "megatron:d1", models("qwen3"))
    assert syncs == [
        ("absent", True, "ready", 0),
        ("ready", False, "ready", 0),
        ("ready", True, "ready", 2),
        ("asleep", True, "ready", 2),
        ("ready", True, "ready", 3),
        ("lost", True, "ready", 3),
    ]
    assert reasons == {"lost"}


def test_an_engine_that_keeps_ending_ends_the_run_with_its_last_words(cluster, models):
    ((message, state),) = cluster.run(ended_too_often, "megatron:d1", models("qwen3"))
    assert "ended 4 times" in message and "the last words" in message and state == "lost"


def ended_too_often(mesh, directory: Path):
    engine, processes = engine_of(mesh, directory, [])
    tensors = load_tensors(directory)

    class Fatal(Policy):
        def weights(self):
            for process in processes:
                process.end()
            return super().weights()

    # Ended after each restart, while weights arrive.
    engine.wake = lambda: [process.end() for process in processes]
    try:
        weight_sync(Fatal(0, tensors), engine)
    except RuntimeError as error:
        return str(error), engine.state.value
    finally:
        engine.close()


@pytest.mark.parametrize("can_sleep", [True, False])
def test_ranks_without_an_engine_have_its_state(can_sleep):
    engine = AbsentEngine(1, can_sleep)
    assert engine.state is EngineState.ABSENT
    engine.update_weights(iter(()), 4)
    assert engine.state is EngineState.READY and engine.version == 4
    engine.sleep()
    assert engine.state is (EngineState.ASLEEP if can_sleep else EngineState.READY)
    assert weight_sync(Policy(4, {}), engine) is can_sleep and engine.state is EngineState.READY


def test_an_engine_that_is_not_ready_refuses_requests_and_names_its_state(models):
    engine = TransformersEngine(models("qwen3"), TOKENIZER, torch.device("cpu"), torch.float32, 8)
    with pytest.raises(AssertionError, match="it is absent"):
        next(engine.generate(requests(1)))
