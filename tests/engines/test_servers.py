"""What an engine of servers does whatever the servers are: buckets of weights, and requests spread by load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fivefold.engines.servers import request_router as module
from fivefold.engines.servers.buckets import (
    WHOLE,
    BroadcastMemory,
    BucketReader,
    BucketWriter,
    HostMemory,
    NoMemory,
    Part,
)
from fivefold.engines.servers.http import blocking_client, streaming_client
from fivefold.engines.servers.request_router import RequestRouter
from fivefold.engines.servers.server import ServerLostError
from fivefold.engines.servers.server_process import ServerProcess, own_environment
from fivefold.engines.servers.transfer import broadcast, join_groups, open_store
from fivefold.engines.servers.weight_sender import Delivery, WeightSender
from fivefold.engines.servers.wire_sender import senders_of
from fivefold.engines.vllm.client import VLLMServer
from fivefold.errors import RunError
from fivefold.interfaces import Pressure
from fivefold.types import Completion, Request, Sampling


def tensors() -> dict[str, torch.Tensor]:
    """Of every kind: one larger than a bucket, an empty one, one number, and bits that no arithmetic leaves as they are."""
    generator = torch.Generator().manual_seed(0)
    odd = torch.tensor([0x7FC1, 0x8000, 0x0001, 0xFF80], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return {
        "large": torch.randn(700, generator=generator),
        "small": torch.randn(3, 5, generator=generator).bfloat16(),
        "odd": odd,
        "none": torch.empty(0, 4),
        "number": torch.tensor(7, dtype=torch.int64),
        "turned": torch.randn(6, 4, generator=generator).T,
        **{f"many.{i}": torch.randn(17, generator=generator) for i in range(40)},
    }


def same_bits(arrived: torch.Tensor, sent: torch.Tensor) -> bool:
    if arrived.dtype != sent.dtype or arrived.shape != sent.shape:
        return False
    return torch.equal(arrived.reshape(-1).view(torch.uint8), sent.reshape(-1).view(torch.uint8))


def through_buckets(mesh, medium: str):
    """All ranks but the last send, the last one takes; what does not arrive bit for bit, and how many buckets there were."""
    ranks, sent, size = mesh.ranks, tensors(), 1024
    rank, last = ranks.rank, ranks.layout.world_size - 1
    groups, part, takes = [], WHOLE, rank == last
    if medium == "broadcast":
        names = [f"of-{sender}" for sender in range(last)]
        store = open_store("0.0.0.0", None, 60.0) if takes else None
        port = ranks.gather_objects(store and store.port)[last]
        store = store or open_store("127.0.0.1", port, 60.0)
        groups = join_groups(store, names if takes else [names[rank]], int(takes), 2, mesh.device)
        assert all(group.options._timeout.total_seconds() == 60 for group in groups)
        part = Part(min(rank, last - 1), last)
    allocate = HostMemory if medium == "memory" else lambda size: BroadcastMemory(size, mesh.device)
    writer = BucketWriter(size, NoMemory if takes else allocate, part)
    reader, arrived, count = BucketReader(mesh.device, groups), {}, 0
    for bucket in writer.buckets(iter(sent.items())):
        count += 1
        handle = ranks.broadcast_from_main(bucket.memory.handle)
        if takes:
            arrived |= dict(reader.take(handle, bucket.entries, bucket.used))
        elif groups:
            broadcast(groups[0], bucket.memory.bytes_B[: bucket.used]).wait()
        # Two buckets are filled in turn: the receiver must have read before.
        ranks.barrier()
    wrong = [name for name in sent if takes and not same_bits(arrived[name], sent[name])]
    reader.close()
    writer.close()
    return wrong, count


@pytest.mark.parametrize(("medium", "layout"), [("memory", "d2"), ("broadcast", "d2"), ("broadcast", "d4")])
def test_weights_go_to_another_process_bit_for_bit(cluster, medium, layout):
    """From one sender, or of each tensor a third from each of three."""
    for wrong, count in cluster.run(through_buckets, f"megatron:{layout}", medium):
        assert wrong == [] and count > 4


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_parts_are_every_byte_of_a_tensor_once(count):
    for name, tensor in tensors().items():
        parts = [Part(index, count).of(tensor) for index in range(count)]
        assert torch.equal(torch.cat(parts), tensor.reshape(-1).view(torch.uint8)), name
        assert max(part.numel() for part in parts) == Part(0, count).size(tensor.nbytes)


@pytest.mark.parametrize(
    ("ranks", "senders"), [(1, [0]), (4, [0, 1, 2, 3]), (16, list(range(0, 16, 2))), (12, [0, 1, 3, 4, 6, 7, 9, 10])]
)
def test_at_most_eight_ranks_send_spread_over_all(ranks, senders):
    assert senders_of(ranks) == senders


def answering(connections: list, seconds: float = 0.0):
    """A server's function for each connection, which is noted and answers each request after some time."""

    async def serve(reader, writer):
        connections.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await asyncio.sleep(seconds)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    return serve


def test_a_connection_that_was_idle_is_not_used_again(tmp_path):
    """Servers close it after 5 seconds: what is sent to it at that moment is lost, and the server would seem to be."""
    connections = []

    async def ask():
        path = tmp_path / "socket"
        async with await asyncio.start_unix_server(answering(connections), path):
            streaming, blocking = streaming_client(f"unix:{path}"), blocking_client(f"unix:{path}")
            for wait in (0.0, 1.2, 1.2):
                await asyncio.sleep(wait)
                assert (await streaming.get("/")).text == "ok"
                assert (await asyncio.to_thread(blocking.get, "/")).text == "ok"
            await streaming.aclose()
            blocking.close()

    asyncio.run(ask())
    assert len(connections) == 6


def test_a_request_costs_the_same_among_many_and_connections_are_used_again(tmp_path):
    connections = []

    async def ask(count: int) -> float:
        connections.clear()
        path, steps = tmp_path / f"socket-{count}", Steps()
        # All requests are in flight at once.
        serve = answering(connections, seconds=0.2)
        async with await asyncio.start_unix_server(serve, path), streaming_client(f"unix:{path}") as client:
            for _ in range(2):
                with steps:
                    answers = await asyncio.gather(*(client.get("/") for _ in range(count)))
                assert [one.text for one in answers] == ["ok"] * count
        assert len(connections) < 2 * count
        return steps.number / count

    few, many = asyncio.run(ask(20)), asyncio.run(ask(320))
    # A client that looks at all its connections for each request takes almost five times as many here.
    assert many < 1.2 * few


def test_a_rank_without_open_files_says_so_and_loses_no_server(tmp_path):
    server = VLLMServer(f"unix:{tmp_path}/socket", set(), "run")

    async def ask() -> None:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        first_free = os.open(os.devnull, os.O_RDONLY)
        os.close(first_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, before[1]))
        try:
            await anext(server.generate("name", [1, 2], Sampling(max_tokens=1), [(0, 0)]))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)

    with pytest.raises(RunError, match=r"no more files can be opened.*ulimit"):
        asyncio.run(ask())


class Steps:
    """Number of Python functions that are called within `with`: unlike time, the same on a busy machine."""

    number = 0

    def __enter__(self) -> None:
        sys.setprofile(self._count)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: object, event: str, argument: object) -> None:
        self.number += event == "call"


_SERVING = """
from http.server import BaseHTTPRequestHandler, HTTPServer

server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.mark.parametrize("call", [("begin_weights", False), ("receive_bucket", [], [], 0), ("sleep",), ("resume",)])
def test_a_stopped_server_is_lost_in_any_call_about_its_weights_or_memory(call):
    """The kernel still accepts connections to a process that is stopped, which answers nothing."""
    with subprocess.Popen([sys.executable, "-c", _SERVING], stdout=subprocess.PIPE, text=True) as serving:
        try:
            server = VLLMServer(f"http://127.0.0.1:{serving.stdout.readline().strip()}", set(), "run", longest_call=0.5)
            serving.send_signal(signal.SIGSTOP)
            begin, (name, *arguments) = time.monotonic(), call
            with pytest.raises(ServerLostError, match="ReadTimeout"):
                getattr(server, name)(*arguments)
            assert time.monotonic() - begin < 30
        finally:
            serving.kill()


class Told:
    """A server that keeps the names of its calls, and is lost in one of them."""

    def __init__(self, lost_in: str = "") -> None:
        self.lost_in, self.calls = lost_in, list[str]()

    def __getattr__(self, name: str):
        def call(*_):
            self.calls.append(name)
            if name == self.lost_in:
                raise ServerLostError("gone")
            return []

        return call


@pytest.mark.parametrize("lost_in", ["begin_weights", "receive_bucket"])
def test_a_server_that_is_lost_while_it_gets_weights_is_not_called_again(lost_in):
    """Each further call to a process that is stopped would wait as long as the first one."""
    ranks = SimpleNamespace(consecutive=lambda size: None)
    sender = WeightSender(ranks, torch.device("cpu"), 1, bucket_bytes=1 << 12)
    servers = {3: Told(lost_in), 4: Told()}
    weights = {f"w{number}": torch.ones(512) for number in range(6)}
    faults, lost = sender.deliver(Delivery(servers, iter(weights.items()), {*weights}, True, 1, lambda: None))
    assert (faults, lost) == ([], {3})
    assert servers[4].calls[0] == "begin_weights" and servers[4].calls[-1] == "finish_weights" and len(servers[4].calls) > 4
    # The next bucket is on its way when the answer to one comes.
    assert servers[3].calls[-1] == lost_in and len(servers[3].calls) <= 3


class InMemory:
    """A server of this process: answers after `seconds`, and can be lost or deaf from its nth answer on."""

    def __init__(self, seconds: float = 0.0, lost_after: int = 10**9, deaf_after: int = 10**9) -> None:
        self.address, self.seconds, self.asked, self.answered = "memory", seconds, 0, 0
        self.lost_after, self.deaf_after, self.most, self.now = lost_after, deaf_after, 0, 0
        self.reading: Pressure | None = None
        self.prompts: list[list[int]] = []

    def progress(self) -> float | None:
        return self.answered if self.answered < self.deaf_after else None

    def pressure(self) -> Pressure | None:
        return self.reading

    async def generate(self, name: str, prompt_ids: list[int], sampling: Sampling, draws: Sequence[tuple[int, int]]):
        self.asked += len(draws)
        self.prompts.append(prompt_ids)
        self.now += len(draws)
        self.most = max(self.most, self.now)
        for number, seed in draws:
            await asyncio.sleep(self.seconds)
            if self.answered >= self.deaf_after:
                await asyncio.sleep(3600)
            if self.answered >= self.lost_after:
                raise ServerLostError("gone")
            self.answered += 1
            self.now -= 1
            yield number, [prompt_ids[0], seed], [0.0, 0.0], "stop", None, None


def asked(prompts: int, per_prompt: int = 4) -> list[Request]:
    return [Request(i, [i // per_prompt], Sampling(max_tokens=2), seed=i) for i in range(prompts * per_prompt)]


def routed(servers: list[InMemory], requests: list[Request], window: int = 8) -> tuple[list[Completion], set[int]]:
    router = RequestRouter(0, window, lambda line: None, stall_seconds=1.0)
    router.serve(servers)
    router.go(5)
    stream = router.open()
    try:
        stream.submit(requests)
        return list(stream.completions()), router.lost
    finally:
        stream.close()
        router.close()


def test_the_faster_server_gets_more_requests_and_none_more_than_its_window():
    slow, fast = InMemory(0.02), InMemory(0.002)
    completions, lost = routed([slow, fast], asked(30))
    assert sorted(one.request_id for one in completions) == list(range(120)) and not lost
    assert all(one.token_ids == [one.request_id // 4, one.request_id] and one.policy_version == 5 for one in completions)
    assert fast.answered > 3 * slow.answered > 0
    # All responses to a prompt are asked of one server, so that the last group may pass the window.
    assert max(slow.most, fast.most) < 8 + 4


@pytest.mark.parametrize("when", [0, 1, 7])
def test_what_a_lost_server_had_is_sampled_by_another_and_counted_once(when):
    dying, other = InMemory(0.001, lost_after=when), InMemory(0.001)
    completions, lost = routed([dying, other], asked(10))
    assert sorted(one.request_id for one in completions) == list(range(40))
    assert lost == {0} and dying.answered == when


def test_requests_without_a_server_left_are_lost():
    completions, lost = routed([InMemory(lost_after=3), InMemory(lost_after=6)], asked(10))
    assert sorted(one.request_id for one in completions) == list(range(40)) and lost == {0, 1}
    assert [one.finish_reason for one in completions] == ["stop"] * 9 + ["lost"] * 31


def test_a_server_that_says_nothing_any_more_is_lost(monkeypatch):
    monkeypatch.setattr(module, "_SILENCE", 0.05)
    deaf, other = InMemory(0.001, deaf_after=5), InMemory(0.001)
    completions, lost = routed([deaf, other], asked(10))
    assert sorted(one.request_id for one in completions) == list(range(40)) and lost == {0}


def test_servers_that_are_stopped_together_are_probed_at_once(monkeypatch):
    """A probe of a stopped process waits for 10 s: servers of a host that is lost would be given up one after the other."""
    monkeypatch.setattr(module, "_SILENCE", 0.05)
    running, together = set[InMemory](), set[int]()

    class Stopped(InMemory):
        def progress(self) -> None:
            running.add(self)
            time.sleep(0.2)
            together.add(len(running))
            running.remove(self)

    completions, lost = routed([*(Stopped(deaf_after=0) for _ in range(3)), InMemory(0.001)], asked(10))
    assert sorted(one.request_id for one in completions) == list(range(40)) and lost == {0, 1, 2}
    assert max(together) == 3


def test_a_server_that_is_slow_is_not_lost(monkeypatch):
    monkeypatch.setattr(module, "_SILENCE", 0.02)
    completions, lost = routed([InMemory(0.5)], asked(1, per_prompt=1))
    assert len(completions) == 1 and not lost


class Stalled(InMemory):
    """Says that it is well, and samples nothing any more."""

    def progress(self) -> float | None:
        return self.answered


def test_a_server_that_samples_no_token_any_more_is_lost(monkeypatch):
    monkeypatch.setattr(module, "_SILENCE", 0.05)
    stalled, other = Stalled(0.001, deaf_after=5), InMemory(0.001)
    completions, lost = routed([stalled, other], asked(10))
    assert sorted(one.request_id for one in completions) == list(range(40)) and lost == {0}


def test_two_askers_get_their_own_and_one_that_goes_away_leaves_the_other_s():
    server = InMemory(0.001)
    router = RequestRouter(0, 8, lambda line: None, stall_seconds=1.0)
    router.serve([server])
    router.go(5)
    first, second = router.open(), router.open()
    first.submit(asked(10))
    second.submit([replace(one, prompt_ids=[99]) for one in asked(5)])
    assert first.take() is not None
    first.close()
    completions = [second.take() for _ in range(20)]
    assert sorted(one.request_id for one in completions) == list(range(20)) and {
        one.token_ids[0] for one in completions
    } == {99}
    assert second.pending == 0 and not any(router.call(lambda: router._loads)) and router.lost == set()
    router.close()


@pytest.mark.parametrize("answered", [0, 2])
def test_dropped_requests_of_a_group_end_at_their_server_even_if_partly_answered(answered):
    router = RequestRouter(0, 8, lambda line: None, stall_seconds=1.0)
    router.serve([InMemory(deaf_after=answered)])
    router.go(5)
    stream = router.open()
    stream.submit(asked(1))
    had = {stream.take().request_id for _ in range(answered)}
    assert stream.take(0.05) is None and not router.is_idle
    stream.drop({0, 1, 2, 3} - had)
    assert stream.pending == 0 and router.is_idle and router.lost == set()
    router.close()


def test_a_request_cancelled_as_its_answer_comes_shows_no_traceback(tmp_path, caplog):
    """Its socket becomes readable in the very pass of the event loop in which the request is cancelled."""
    import anyio

    router, arrived = RequestRouter(0, 8, lambda line: None, stall_seconds=1.0), []

    async def cancel_as_data_comes(listening: socket.socket) -> None:
        client = await anyio.connect_unix(str(tmp_path / "socket"))
        answering, _ = listening.accept()
        reading = asyncio.ensure_future(client.receive())
        await asyncio.sleep(0.1)
        answering.send(b"answer")
        asyncio.get_running_loop().call_soon(reading.cancel)
        arrived.append(await asyncio.gather(reading, return_exceptions=True))
        await client.aclose()
        answering.close()
        (done := asyncio.Future()).set_result(None)
        for fault in (lambda: [][0], lambda: done.set_result(None)):
            asyncio.get_running_loop().call_soon(fault)
        await asyncio.sleep(0)

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        listening.listen()
        asyncio.run_coroutine_threadsafe(cancel_as_data_comes(listening), router._loop).result()
    router.close()
    assert isinstance(arrived[0][0], asyncio.CancelledError)
    # Any other error of a callback is reported.
    assert [record.exc_info[0] for record in caplog.records] == [IndexError, asyncio.InvalidStateError]


def test_requests_that_are_dropped_before_they_were_sent_leave_their_server_idle():
    router = RequestRouter(0, 8, lambda line: None, stall_seconds=1.0)
    router.serve([InMemory()])
    router.go(5)
    stream = router.open()

    def add_and_drop():
        router.add(stream, asked(1))
        router.forget(stream)

    router.call(add_and_drop)
    time.sleep(0.05)
    assert router.is_idle and router.lost == set()
    router.close()


def test_what_is_dropped_leaves_the_others_of_its_prompt():
    router = RequestRouter(0, 8, lambda line: None, stall_seconds=1.0)
    router.serve([InMemory(0.01)])
    router.go(5)
    stream = router.open()
    stream.submit(asked(2))
    stream.drop([0, 7])
    assert {stream.take(5.0).request_id for _ in range(6)} == {1, 2, 3, 4, 5, 6}
    assert stream.pending == 0
    router.close()


def test_nothing_is_asked_between_hold_and_go():
    server = InMemory()
    router = RequestRouter(0, 8, lambda line: None, stall_seconds=1.0)
    router.serve([server])
    stream = router.open()
    stream.submit(asked(2))
    assert stream.take(0.05) is None and server.asked == 0
    router.go(7)
    assert {stream.take().policy_version for _ in range(8)} == {7}
    router.hold()
    stream.submit(asked(1))
    assert stream.take(0.05) is None and server.asked == 8
    router.close()


def turn_of(number: int, trajectory: int, turn: int) -> Request:
    return Request(number, [trajectory, *range(turn)], Sampling(max_tokens=2), 0, trajectory, turn)


@pytest.fixture
def routing():
    routers = []

    def make(servers: list[InMemory], window: int = 8):
        router = RequestRouter(0, window, lambda line: None, stall_seconds=60.0)
        router.serve(servers)
        router.go(5)
        routers.append(router)
        return router, router.open()

    yield make
    for router in routers:
        router.close()


def test_a_trajectory_stays_with_the_server_of_its_turn_before_unless_that_is_lost(routing):
    servers = [InMemory(0.001) for _ in range(4)]
    router, stream = routing(servers)
    for turn in range(6):
        stream.submit([turn_of(20 * turn + offset, offset, turn) for offset in range(20)])
        assert len(list(stream.completions())) == 20
    homes = {}
    for number, server in enumerate(servers):
        for prompt in server.prompts:
            assert homes.setdefault(prompt[0], number) == number
    assert {len([1 for home in homes.values() if home == number]) for number in range(4)} == {5}
    servers[2].lost_after = 0
    stream.submit([turn_of(200 + offset, offset, 6) for offset in range(20)])
    assert len(list(stream.completions())) == 20 and router.lost == {2}
    # From then on, what that server had stays where it went.
    before = [len(server.prompts) for server in servers]
    for turn in (7, 8):
        stream.submit([turn_of(100 * turn + offset, offset, turn) for offset in range(20)])
        assert len(list(stream.completions())) == 20
    moved = {prompt[0]: number for number in (0, 1, 3) for prompt in servers[number].prompts[: before[number]]}
    for number in (0, 1, 3):
        assert all(moved[prompt[0]] == number for prompt in servers[number].prompts[before[number] :])


def test_a_trajectory_whose_server_is_full_goes_to_another_one(routing):
    full, other = InMemory(0.001), InMemory(0.001)
    router, stream = routing([full, other])
    stream.submit([turn_of(0, 7, 0)])
    assert len(list(stream.completions())) == 1 and full.asked == 1
    router.call(lambda: router._readings._of.update({0: Pressure(0.95, 0), 1: Pressure(0.1, 0)}))
    stream.submit([turn_of(1, 7, 1), turn_of(2, 8, 0)])
    assert len(list(stream.completions())) == 2 and full.asked == 1 and other.asked == 2
    router.call(lambda: router._readings._of.update({1: Pressure(0.95, 0)}))
    stream.submit([turn_of(3, 9, 0)])
    assert len(list(stream.completions())) == 1, "where all are full, one of them gets it"


def test_later_turns_go_before_first_ones_and_no_head_blocks_another(routing):
    slow, fast = InMemory(0.3), InMemory(0.001)
    router, stream = routing([slow, fast], window=1)
    router.hold()
    stream.submit([turn_of(0, 0, 0), turn_of(1, 1, 0)])
    router.go(5)
    assert stream.take(5.0).request_id == 1, "trajectory 0 is with the slow server"
    # The slow server has one request, and may have no more: later turns of its trajectories go to the other.
    stream.submit([turn_of(10 + offset, 10 + offset, 0) for offset in range(20)])
    stream.submit([turn_of(2, 0, 1), turn_of(3, 1, 1)])
    order = [one.request_id for one in stream.completions()]
    assert order.index(2) < 4 and order.index(3) < 4 and len(order) == 23
    assert order.index(0) > 10, "what waits for the slow server holds up nothing"


def test_pressure_is_that_of_all_servers_and_is_read_only_while_they_have_turns(routing, monkeypatch):
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.005)
    servers = [InMemory(0.2), InMemory(0.2)]
    servers[0].reading, servers[1].reading = Pressure(0.25, 3, 10.0, 4.0), Pressure(0.5, 1, 30.0, 26.0)
    _, stream = routing(servers)
    stream.submit(asked(2))
    assert len(list(stream.completions())) == 8 and stream.pressure() is None
    stream.submit([turn_of(0, 0, 0), turn_of(1, 1, 0)])
    assert len(list(stream.completions())) == 2
    assert stream.pressure() == Pressure(0.5, 4, 40.0, 30.0)


class Cutting(InMemory):
    """Samples a token at a time, each of which says what it was asked with; ends with what it has when it is told to."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(seconds)
        self.is_cut, self.asks = asyncio.Event(), []

    async def generate(self, name, prompt_ids, sampling, draws):
        self.asks += [(list(prompt_ids), sampling.max_tokens, sampling.min_tokens, seed) for _, seed in draws]
        for number, _ in draws:
            tokens = []
            while len(tokens) < sampling.max_tokens and not self.is_cut.is_set():
                tokens.append(100 + len(prompt_ids) + len(tokens))
                await asyncio.sleep(self.seconds)
            reason = "length" if len(tokens) == sampling.max_tokens else "abort"
            yield number, tokens, [-float(token) for token in tokens], reason, None, None


def cut_again_and_again(router: RequestRouter, server: Cutting, versions: range) -> None:
    for version in versions:
        router.hold(keeps=True)
        router.call(server.is_cut.set)
        while not router.is_idle:
            time.sleep(0.001)
        router.call(server.is_cut.clear)
        router.go(version)
        time.sleep(0.03)


@pytest.fixture
def cutting():
    server, router = Cutting(0.002), RequestRouter(0, 8, lambda line: None, stall_seconds=1.0)
    router.serve([server])
    router.go(5)
    yield server, router
    router.close()


def test_what_is_cut_continues_where_it_was_with_the_versions_of_its_tokens(cutting):
    server, router = cutting
    stream = router.open()
    requests = [Request(i, [i], Sampling(max_tokens=60, min_tokens=20), seed=i) for i in range(6)]
    stream.submit(requests)
    time.sleep(0.03)
    cut_again_and_again(router, server, range(6, 9))
    completions = {one.request_id: one for one in (stream.take(10.0) for _ in requests)}
    assert sorted(completions) == list(range(6)) and stream.pending == 0 and not router.call(lambda: router._begun)
    for one in completions.values():
        # Each token says how long its prompt and what was there were: none is missing, none twice.
        assert one.token_ids == list(range(101, 161)) and one.logprobs == [-float(token) for token in one.token_ids]
        assert one.finish_reason == "length" and one.policy_version == 5 == one.token_versions[0]
        assert one.token_versions == sorted(one.token_versions) and set(one.token_versions) == {5, 6, 7, 8}
    for prompt, most, least, _ in server.asks:
        assert (
            most == 61 - len(prompt)
            and least == max(0, 21 - len(prompt))
            and prompt[1:] == list(range(101, 100 + len(prompt)))
        )
    seeds = [seed for *_, seed in server.asks]
    assert len(seeds) > 12 and len(set(seeds)) == len(seeds), "the same random numbers were drawn twice"


def test_what_is_cut_and_wanted_by_no_one_is_not_asked_for_again(cutting):
    server, router = cutting
    stream = router.open()
    stream.submit([Request(i, [i], Sampling(max_tokens=60), seed=i) for i in range(4)])
    time.sleep(0.02)
    router.hold(keeps=True)
    stream.drop({0})
    router.call(server.is_cut.set)
    while not router.is_idle:
        time.sleep(0.001)
    stream.drop({1})
    router.call(server.is_cut.clear)
    router.go(6)
    assert {stream.take(5.0).request_id for _ in range(2)} == {2, 3}
    assert stream.pending == 0 and not router.call(lambda: router._begun)
    assert sorted(prompt[0] for prompt, *_ in server.asks) == [0, 1, 2, 2, 3, 3]


def test_what_is_cut_and_then_aborted_gives_what_there_is(cutting):
    server, router = cutting
    stream = router.open()
    stream.submit([Request(0, [0], Sampling(max_tokens=60), seed=0)])
    time.sleep(0.02)
    router.hold(keeps=True)
    router.call(server.is_cut.set)
    while not router.is_idle:
        time.sleep(0.001)
    router.abort()
    completion = stream.take(5.0)
    assert (
        completion.finish_reason == "abort"
        and completion.token_ids == list(range(101, 101 + len(completion.token_ids))) != []
    )


def test_a_response_with_stop_strings_that_is_cut_is_aborted(cutting):
    server, router = cutting
    stream = router.open()
    stream.submit([Request(0, [0], Sampling(max_tokens=60, stop=("x",)), seed=0)])
    time.sleep(0.02)
    router.hold(keeps=True)
    router.call(server.is_cut.set)
    assert stream.take(5.0).finish_reason == "abort"


class Broken(InMemory):
    async def generate(self, name, prompt_ids, sampling, draws):
        yield 0, [1], [0.0], "stop", None, None
        raise RuntimeError("a prompt longer than the engine's max_model_len")


def test_an_error_of_a_server_that_lives_is_raised():
    with pytest.raises(RuntimeError, match="longer than the engine's"):
        routed([Broken()], asked(1))


def test_a_process_that_ends_at_once_is_told_with_its_first_error(tmp_path):
    module_file = tmp_path / "dies.py"
    module_file.write_text(
        "import sys\nprint('noise\\n' * 50)\nprint('ValueError: no room for the cache', file=sys.stderr)\n"
        "print('more\\n' * 50)\nraise RuntimeError('the engine failed')\n"
    )
    served = ServerProcess(["dies"], own_environment({"PYTHONPATH": str(tmp_path)}), tmp_path / "log", lambda _: False)
    served.start()
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        served.wait()
    assert time.monotonic() - begin < 60
    lines = str(caught.value).splitlines()
    assert lines[0] == "the engine's server did not start"
    assert {"ValueError: no room for the cache", "RuntimeError: the engine failed"} <= set(lines[1:4])
    served.close()


@pytest.mark.parametrize("chosen", ["", "0", "1"])
def test_a_server_of_sglang_uses_nccl_s_memory_as_the_trainer_does(tmp_path, monkeypatch, chosen):
    from fivefold.engines.sglang.serve import server_process

    monkeypatch.setenv("NCCL_CUMEM_ENABLE", chosen)
    if not chosen:
        monkeypatch.delenv("NCCL_CUMEM_ENABLE")
    server = server_process({"context_length": 8}, torch.device("cpu"), 1, tmp_path / "log", lambda _: False)
    server.close()
    # -2 is what NCCL itself takes if the variable is missing; SGLang takes 0 then.
    assert server._environment["NCCL_CUMEM_ENABLE"] == (chosen or "-2")


def test_sockets_of_a_process_that_was_killed_are_removed_by_the_next_one(tmp_path):
    program = "import sys; from fivefold.engines.servers.server_process import ServerProcess\n"
    program += "p = ServerProcess([], {}, None, bool); print(p.address, flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    directory = Path(process.stdout.readline().strip().removeprefix("unix:")).parent
    assert directory.is_dir() and directory.stat().st_mode & 0o777 == 0o700
    process.kill()
    process.communicate()
    ServerProcess([], {}, tmp_path / "log", bool).close()
    assert not directory.exists()
    assert not any(f"-{os.getpid()}-" in path.name for path in directory.parent.glob("fivefold-*"))
