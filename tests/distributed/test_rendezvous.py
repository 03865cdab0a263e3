"""Where ranks meet, who can reach it, and what they take from each other."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch

from tests.support.commands import Command, children_of, gone, wait_for
from tests.support.whole_runs import make_model, write_run

RUN = """
policy: {backend: "megatron:d2", tokens_per_micro_batch: 24}
algorithm: {name: grpo, group_size: 4}
data: {prompts_per_step: 4, max_response_tokens: 8}
trainer: {steps: 100000, save_every: 1, loggers: [console]}
"""


def _listening(pids: list[int]) -> list[tuple[str, int]]:
    addresses = []
    for pid in pids:
        connections = psutil.Process(pid).net_connections("tcp")
        addresses += [tuple(connection.laddr) for connection in connections if connection.status == psutil.CONN_LISTEN]
    return addresses


def test_ranks_of_one_machine_listen_on_its_loopback_interface_only(tmp_path):
    make_model(tmp_path, rows=16)
    write_run(tmp_path, RUN)
    process = Command("train", tmp_path / "run.yaml")
    try:
        wait_for((tmp_path / "runs/base/checkpoints/step-000001").exists, process)
        everyone = children_of(process.pid)
        ranks = [child.pid for child in psutil.Process(process.pid).children()]
        addresses = _listening([process.pid, *everyone])
        ports = {int(psutil.Process(pid).environ().get("MASTER_PORT", 0)) for pid in ranks}
    finally:
        process.kill()
        process.wait()
    assert addresses, "Gloo listens"
    assert {host for host, _ in addresses} == {"127.0.0.1"}
    assert not ports.intersection(port for _, port in addresses), "ranks meet in a directory"
    wait_for(lambda: gone(everyone))


def test_a_store_listens_on_one_address():
    from fivefold.distributed.rendezvous import open_store

    store = open_store("127.0.0.1", 0, timedelta(seconds=20), is_held=True)
    assert ("127.0.0.1", store.port) in _listening([os.getpid()])
    assert not [host for host, port in _listening([os.getpid()]) if port == store.port and host != "127.0.0.1"]
    other = open_store("127.0.0.1", store.port, timedelta(seconds=20), is_held=False)
    store.set("key", "value")
    assert other.get("key") == b"value"


def test_a_name_that_means_this_machine_only_is_said_where_others_must_reach_it(capfd):
    from fivefold.distributed.rendezvous import open_store

    store = open_store("localhost", 0, timedelta(seconds=20), is_held=True, is_spread=True)
    assert "listens on all of its addresses" in capfd.readouterr().out
    assert store.port


class Evil:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self._mark),)


def exchange_pickles(mesh, mark):
    """What becomes of plain values, and of an object that runs code where it is unpickled."""
    import torch
    import torch.distributed as dist

    plain: list = [None, None]
    sizes = torch.Size([2, 3]), torch.bfloat16
    dist.all_gather_object(plain, ((("lr", 1.0), ("wd", None)), sizes, mesh.ranks.rank), group=mesh.ranks.world)  # noqa: TID251
    try:
        dist.all_gather_object([None, None], Evil(mark), group=mesh.ranks.world)  # noqa: TID251
    except Exception as error:
        return plain, f"{type(error).__name__}: {error}"
    return plain, "taken"


def test_nothing_that_a_peer_sends_is_unpickled(cluster, tmp_path):
    import torch

    plain, refusal = cluster.run(exchange_pickles, "megatron:d2", tmp_path / "mark")[0]
    assert plain == [((("lr", 1.0), ("wd", None)), ((2, 3), torch.bfloat16), rank) for rank in range(2)]
    assert refusal.startswith("UnpicklingError: ranks exchange plain values only") and "mkdir" in refusal
    assert not (tmp_path / "mark").exists()


def test_only_records_of_a_library_that_exchanges_them_are_built(monkeypatch):
    import io
    import pickle

    from fivefold.distributed import objects

    monkeypatch.setattr(objects, "_libraries", {"fivefold"})

    def loaded(value):
        return objects._PlainUnpickler(io.BytesIO(pickle.dumps(value))).load()

    from fivefold.distributed.pulse import Sign, Silence

    assert loaded(Sign(1, True, "here")) == Sign(1, True, "here")
    for value in (Silence(), objects.take_records_of, os.mkdir):
        with pytest.raises(pickle.UnpicklingError):
            loaded(value)


def test_tensors_between_ranks_are_built_without_unpickling_what_their_storage_holds(monkeypatch):
    import io
    import pickle

    from fivefold.distributed import objects

    def loaded(content: bytes):
        return objects._PlainUnpickler(io.BytesIO(content)).load()

    handles = [torch.arange(64, dtype=torch.uint8), torch.arange(10.0)[3:7], torch.zeros(0)]
    for sent, arrived in zip(handles, loaded(pickle.dumps(handles)), strict=True):
        assert arrived.dtype == sent.dtype and torch.equal(arrived, sent)

    class Storage:
        """A storage whose bytes are a pickle that runs code, which torch.storage._load_from_bytes would do."""

        def __reduce__(self):
            return torch.storage._load_from_bytes, (pickle.dumps(Planted()),)

    ran = []
    monkeypatch.setattr(os, "fivefold_planted", ran.append, raising=False)

    class Planted:
        def __reduce__(self):
            return eval, ("__import__('os').fivefold_planted(1)",)

    with pytest.raises(pickle.UnpicklingError):
        loaded(pickle.dumps([Storage()]))
    assert not ran


def exchange_json(mesh):
    value = {"rank": mesh.ranks.rank, "names": ["é", None], "nan": float("inf"), "big": 2**70, "third": 1 / 3}
    return mesh.ranks.gather_objects(value), mesh.ranks.broadcast_from_main(value if mesh.ranks.is_main else None)


def test_small_objects_arrive_as_they_were_sent(cluster):
    for gathered, sent in cluster.run(exchange_json, "megatron:d2"):
        assert [one["rank"] for one in gathered] == [0, 1] and sent == gathered[0]
        assert gathered[1] == {"rank": 1, "names": ["é", None], "nan": float("inf"), "big": 2**70, "third": 1 / 3}


@pytest.mark.parametrize("value", [{1: 2}, Path("a"), [{"a": {2.5: ""}}], {"a": {3}}, b"bytes"])
def test_values_that_json_would_change_are_refused(value):
    from fivefold.distributed.objects import _encoded

    with pytest.raises(TypeError, match=r"what ranks exchange|ranks exchange None"):
        _encoded(value)


def test_the_stores_of_weights_and_of_servers_listen_where_servers_are():
    from fivefold.engines.servers.http import own_address
    from fivefold.engines.servers.transfer import open_store

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = own_address(f"http://127.0.0.1:{server.getsockname()[1]}")
    store = open_store(address, None, 20.0)
    assert {host for host, port in _listening([os.getpid()]) if port == store.port} == {"127.0.0.1"}
