"""How weights reach servers on devices of their own, next to one broadcast of the same bytes: half of the GPUs train.

`python benchmarks/wire_sync.py [PART ...] [--seconds N]`: every part (`PARTS` below), or those named, each for N seconds at
most. On a CPU the same over Gloo with a smaller model. `servers` needs vLLM.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.engine_speed import arguments, tell
from benchmarks.harness import Part, run
from fivefold.engines.servers.buckets import BroadcastMemory, BucketReader, BucketWriter
from fivefold.engines.servers.buckets import Part as Share
from fivefold.engines.servers.transfer import broadcast, join_groups, open_store
from tests.support.gpu_models import build, is_large, synchronize, timed, write_model
from tests.support.tiny_models import make_model

if TYPE_CHECKING:
    from fivefold.megatron.mesh import Mesh

BUCKET = (256 if torch.cuda.is_available() else 32) << 20
ROUNDS, SECONDS = 4, 300.0


def write_small(mesh: Mesh, name: str, directory: Path) -> None:
    """For a CPU: 0.3 GiB in float32, in tensors of up to 47 MiB."""
    sizes = {"vocab_size": 16000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "head_dim": 64}
    make_model(name, directory, **sizes, num_attention_heads=12, num_key_value_heads=4)


def tensors(mesh: Mesh) -> dict[str, Tensor]:
    """Like those of a model: 2 GiB on a GPU, 0.4 GiB on a CPU."""
    wide, count = (4096, 32) if is_large(mesh) else (1024, 24)
    kind = torch.bfloat16 if is_large(mesh) else torch.float32
    return {f"layer.{i}": torch.full((wide * 2, wide * 2), float(i), dtype=kind, device=mesh.device) for i in range(count)}


def gib(size: float) -> float:
    return round(size / 2**30, 3)


def finished(mesh: Mesh, call: Callable[[], Any]) -> float:
    """The median of the seconds that it takes on all ranks, after the first time."""

    def together() -> None:
        call()
        synchronize(mesh)
        mesh.ranks.barrier()

    mesh.ranks.barrier()
    return sorted(timed(mesh, together)[0] for _ in range(ROUNDS))[ROUNDS // 2 - 1]


# --- what runs on a rank ---------------------------------------------------------------------------------------------


def wire(mesh: Mesh, senders: int) -> dict[str, Any]:
    """The first half of the ranks sends to the second: parts of every bucket by `senders` of them, or broadcasts by one."""
    ranks, held = mesh.ranks, tensors(mesh)
    rank, half = ranks.rank, ranks.layout.world_size // 2
    takes, size = rank >= half, sum(tensor.nbytes for tensor in held.values())
    store: Any = open_store("0.0.0.0", None, SECONDS) if ranks.is_main else None
    where = "127.0.0.1", ranks.broadcast_from_main(store.port if ranks.is_main else None), SECONDS
    groups: list[Any] = []
    if takes or rank < senders:
        names = [f"of-{sender}" for sender in range(senders)]
        mine = names if takes else [names[rank]]
        groups = join_groups(open_store(*where), mine, rank - half + 1 if takes else 0, half + 1, mesh.device)
    one = dist.new_group([0, *range(half, 2 * half)])
    writer = BucketWriter(BUCKET, lambda size: BroadcastMemory(size, mesh.device), Share(min(rank, senders - 1), senders))
    reader = BucketReader(mesh.device, groups)

    def parts() -> None:
        under_way = []
        for bucket in writer.buckets(iter(held.items())) if groups else ():
            if takes:
                for name, tensor in reader.take(bucket.memory.handle, bucket.entries, bucket.used):
                    held[name] = tensor
                continue
            under_way.append(broadcast(groups[0], bucket.memory.bytes_B[: bucket.used]))
            if len(under_way) > 1:
                under_way.pop(0).wait()
        for work in under_way:
            work.wait()

    flat = torch.empty(size, dtype=torch.uint8, device=mesh.device)

    def whole() -> None:
        for piece in flat.split(BUCKET) if takes or rank == 0 else ():
            dist.broadcast(piece, 0, group=one)

    times = {"senders": senders, "receivers": half, "gib": gib(size)}
    for what, call in (("parts", parts), ("broadcast", whole)):
        call()
        times[what] = round(finished(mesh, call), 3)
    return times | {"parts_over_broadcast": round(times["parts"] / times["broadcast"], 2)}


def servers(mesh: Mesh, directory: Path, layout: str, how: str) -> None:
    """Syncs of a policy on all ranks to vLLM's servers after them: seconds of all, and of the pause in it."""
    from fivefold.engines.servers.placement import Machine, place_servers
    from fivefold.engines.servers.server_engine import ServerEngine
    from fivefold.engines.vllm.client import VLLMServer
    from fivefold.engines.vllm.probe import answers
    from fivefold.engines.vllm.serve import server_process
    from fivefold.layout import ParallelLayout

    large, engine_layout, ranks = is_large(mesh), ParallelLayout.parse(layout), mesh.ranks
    model = build(mesh, directory, "bfloat16" if large else "float32", 16384 if large else 64)
    world = ranks.layout.world_size
    machine = Machine(range(world), torch.cuda.device_count() if large else None, range(world))
    given = {"model": str(directory), "tensor_parallel_size": engine_layout.tp} | arguments(directory, large)
    processes = {
        place.number: server_process(
            given,
            torch.device("cuda", place.first_gpu) if place.first_gpu is not None else mesh.device,
            engine_layout.tp,
            directory.parent / f"server-{layout}-{place.number}.log",
            answers,
        )
        for place in place_servers(engine_layout, [machine])
        if place.rank == ranks.rank
    }
    run_name = ranks.broadcast_from_main(f"benchmark-{time.time()}")
    engine = ServerEngine(
        directory, ranks, mesh.device, partial(VLLMServer, ends=set(), run=run_name), print,
        processes=processes, ranks_per_server=engine_layout.tp if how == "shared memory" else None,
        window=320, bucket_bytes=BUCKET, verify_every=0, can_sleep=False, is_staged=how == "staged",
    )  # fmt: skip
    begun: list[float] = []
    begin_update = engine._begin_update

    def noted() -> None:
        begin_update()
        begun.append(time.perf_counter())

    engine._begin_update = noted  # type: ignore[method-assign]
    phases = {"begin_weights": 0.0, "receive_bucket": 0.0, "finish_weights": 0.0}
    for server in engine._servers_to_call.values():
        for name in phases:

            def watched(*given: Any, server: Any = server, name: str = name) -> Any:
                begin = time.perf_counter()
                answer = getattr(type(server), name)(server, *given)
                phases[name] += (time.perf_counter() - begin) / (ROUNDS * len(engine._servers_to_call)) * (len(begun) > 1)
                return answer

            setattr(server, name, watched)
    size = 0

    def counted(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        nonlocal size
        for name, tensor in weights:
            size += tensor.nbytes
            yield name, tensor

    seconds, pauses = [], []
    for version in range(ROUNDS + 1):
        size = 0
        took, _ = timed(mesh, lambda version=version: engine.update_weights(counted(model.weights()), version))
        seconds.append(took)
        pauses.append(time.perf_counter() - begun[-1])
    gathering = finished(mesh, lambda: [None for _ in model.weights()])
    flat = torch.empty(size, dtype=torch.uint8, device=mesh.device)
    whole = finished(mesh, lambda: [dist.broadcast(piece, 0) for piece in flat.split(BUCKET)]) if world > 1 else None
    middle = sorted(range(1, ROUNDS + 1), key=seconds.__getitem__)[ROUNDS // 2 - 1]
    numbers = {"senders": world, "gib": gib(size), "all": round(seconds[middle], 3), "pause": round(pauses[middle], 3)}
    numbers |= {name: round(value, 3) for name, value in phases.items()}
    numbers |= {"first": round(seconds[0], 3), "gathering_alone": round(gathering, 3)}
    if whole is not None:
        numbers |= {"broadcast": round(whole, 3), "all_over_broadcast": round(seconds[middle] / whole, 2)}
    tell(mesh, how, numbers)
    engine.close()


# --- parts -----------------------------------------------------------------------------------------------------------


def transfers(part: Part) -> None:
    """The transfer alone: tensors of one half of the devices to the other half."""
    half = max(1, part.gpus // 2) if part.large else 2
    for senders in sorted({1, half}):
        part.say(f"{senders} of {half} send", part.measure("wire", f"d{2 * half}", wire, senders))


def syncs(part: Part) -> None:
    """Whole syncs with vLLM's servers: the policy on one half of the devices, the engine on the other."""
    half = max(1, part.gpus // 2) if part.large else 2
    model = part.model("qwen3_8b", write_model) if part.large else part.model("qwen3", write_small)
    for policy, engine in ((f"d{half}", f"vllm:d{half}"), (f"t{half}", f"vllm:t{half}")):
        part.say(f"policy {policy}, engine {engine}", "")
        # Processes on a CPU can share memory wherever they are; GPUs apart cannot.
        for how in ("over the wire", "staged", *(() if part.large else ("shared memory",))):
            part.measure("sync", policy, servers, model, engine, how)


PARTS: dict[str, Callable[[Part], None]] = {"wire": transfers, "servers": syncs}

if __name__ == "__main__":
    # Ranks find functions by the name of their module.
    from benchmarks import wire_sync

    sys.exit(run(__doc__, wire_sync.PARTS))
