"""What a checkpoint costs on the GPUs that are there: the pause of training, seconds to the disk, memory, and the way back.

`python benchmarks/checkpoint_speed.py [PART ...] [--seconds N]`: every part (`PARTS` below) that the machine has GPUs for,
or those named, each for N seconds at most. Checkpoints lie in a new directory in TMPDIR, one at a time, and are removed; a
part whose checkpoint does not fit there is not begun. Every number is printed when it is known. On a CPU models are tiny.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import psutil

from benchmarks.harness import Part, run
from fivefold.backend import sharded_files
from fivefold.backend.sharded_files import Piece
from fivefold.checkpoint.checkpoints import Checkpoints, RunState, sync_file
from fivefold.checkpoint.saving import Saving
from fivefold.megatron import dist_checkpoint
from tests.support.gpu_models import build, random_batch, synchronize, timed
from tests.support.shards import shard_of_replica
from tests.support.two_steps import OBJECTIVE

if TYPE_CHECKING:
    from fivefold.megatron.mesh import Mesh
    from fivefold.megatron.model import MegatronModel

BLOCK = 16 << 20
"""Bytes that a plain writer writes at once."""
PLAIN = 32 << 30
"""Bytes that a plain writer writes at most: enough for its rate."""
PAUSE, SHARE_OF_PLAIN = 5.0, 0.8
"""Seconds that training may pause at most, and the least share of the rate that plain writers reach."""

DIFFER = "ranks that loaded other numbers than were saved"


# --- what runs on a rank ---------------------------------------------------------------------------------------------


class Measured:
    """What the ranks find, printed by the first of them as it comes."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.ranks = mesh, mesh.ranks
        self.numbers: dict[str, float] = {}

    def say(self, what: str, value: float, digits: int = 2) -> None:
        self.numbers[what] = value
        if self.ranks.is_main:
            print(f"  {what}: {value:,.{digits}f}", flush=True)

    def most(self, number: float) -> float:
        return self.ranks.all_reduce_max(number)

    def sum(self, number: float) -> float:
        return self.ranks.all_reduce_sum_world([number])[0]


class HostMemory:
    """The most bytes that this process and the whole machine hold, above what they held; the page cache is not counted."""

    def __init__(self) -> None:
        self._first = self._now()
        self.peak = (0, 0)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _now(self) -> tuple[int, int]:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        # Pinned memory is shared with the driver, and on some machines it is in neither.
        process_bytes = sum(1024 * int(status[name].split()[0]) for name in ("RssAnon", "RssShmem"))
        machine = psutil.virtual_memory()
        return process_bytes, machine.total - machine.available

    def _look(self) -> None:
        while not self._end.wait(0.02):
            above = [now - first for now, first in zip(self._now(), self._first, strict=True)]
            self.peak = max(self.peak[0], above[0]), max(self.peak[1], above[1])

    def __enter__(self) -> HostMemory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()


def measure(mesh: Mesh, directory: Path, root: Path, tokens: int, samples: int, length: int) -> dict[str, float]:
    """Write plainly, save in the background and waited for, load; raises ValueError where the disk is too small."""
    measured, ranks = Measured(mesh), mesh.ranks
    seconds, model = timed(mesh, lambda: build(mesh, directory, "bfloat16", tokens))
    measured.say("model built, seconds", measured.most(seconds))
    batch = random_batch(samples, length, model.spec.vocab).select(shard_of_replica(ranks, range(samples)))

    def step() -> None:
        model.train_step(batch, OBJECTIVE.loss)

    step()
    memory = HostMemory()
    begin = time.perf_counter()
    model.prepare_snapshots()
    copy_memory = model._copies._memory
    assert copy_memory is not None
    copy_memory.result()
    measured.say("memory for the copy made beside the run, seconds", measured.most(time.perf_counter() - begin))
    quiet = min(timed(mesh, step)[0] for _ in range(2))
    measured.say("training step, seconds", measured.most(quiet), 3)
    share = share_of(model, mesh)
    size = sized(measured, model, root)
    plain = plain_writers(measured, root, share)
    background(measured, memory, model, root, step, share, size, plain)
    waited(measured, model, root, size, plain)
    return measured.numbers


def share_of(model: MegatronModel, mesh: Mesh) -> int:
    """Return the bytes that this rank writes."""
    return sum(piece.values.nbytes for piece in pieces_of(model, mesh))


def sized(measured: Measured, model: MegatronModel, root: Path) -> float:
    """Return the bytes of a checkpoint; raises ValueError where the disk has no room for them."""
    share = share_of(model, measured.mesh)
    size = measured.sum(share)
    measured.say("checkpoint, GB", size / 1e9, 3)
    measured.say("largest share of a rank, GB", measured.most(share) / 1e9, 3)
    free = shutil.disk_usage(root).free
    # Every rank sees the same disk: all of them end here, or none.
    if measured.ranks.all_reduce_max(float(free < 1.02 * size)):
        raise ValueError(f"{root} must hold a checkpoint: {size / 1e9:.1f} GB, got {free / 1e9:.1f} GB; set TMPDIR")
    return size


def plain_writers(measured: Measured, root: Path, share: int) -> float:
    """GB a second of as many processes as there are ranks, each of which writes bytes into a file and syncs it."""
    share = min(share, PLAIN)
    path = root / f"plain-{measured.ranks.rank}"
    block = memoryview(os.urandom(BLOCK))

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            for begin in range(0, share, BLOCK):
                file.write(block[: min(BLOCK, share - begin)])
        sync_file(path)
        measured.ranks.barrier()

    measured.ranks.barrier()
    seconds, _ = timed(measured.mesh, write)
    path.unlink()
    rate = measured.sum(share) / 1e9 / measured.most(seconds)
    measured.say("plain writers, GB a second", rate, 3)
    return rate


@contextmanager
def saved(measured: Measured, root: Path) -> Iterator[Callable[[Any, bool], Saving]]:
    """Begins to save a model, in the background or not; what it wrote is removed."""
    checkpoints = Checkpoints(root, keep=1)
    state = RunState(step=1, version=1, layout=str(measured.mesh.layout), rollouts={}, kl_coef=0.0)

    def begin(model: MegatronModel, in_background: bool) -> Saving:
        parts = {"policy": model.snapshot(copies=in_background)}
        return Saving(checkpoints, state, parts, measured.ranks, "", in_background)

    try:
        yield begin
    finally:
        measured.ranks.barrier()
        if measured.ranks.is_main:
            shutil.rmtree(root / "checkpoints")
        measured.ranks.barrier()


def background(
    measured: Measured,
    memory: HostMemory,
    model: MegatronModel,
    root: Path,
    step: Callable[[], None],
    share: int,
    size: float,
    plain: float,
) -> None:
    """As `trainer.async_save` does it, with training steps meanwhile; then the way back. `memory` began before it."""
    mesh = measured.mesh
    with saved(measured, root) as begin:
        synchronize(mesh)
        before = state_of(model, mesh)
        with memory:
            first = time.perf_counter()
            saving = begin(model, True)
            synchronize(mesh)
            measured.say("first background save, pause in seconds", measured.most(time.perf_counter() - first))
            steps = []
            while (path := saving.finish(wait=False)) is None:
                steps.append(timed(mesh, step)[0])
            seconds = measured.most(time.perf_counter() - first)
        measured.say("... on the disk after seconds, training steps meanwhile", seconds)
        measured.say("... GB a second", size / 1e9 / seconds, 3)
        measured.say("... share of plain writers", size / 1e9 / seconds / plain)
        measured.say("... training step meanwhile, mean seconds", measured.most(sum(steps) / max(1, len(steps))), 3)
        measured.say("... host memory of a rank above its share, GB", measured.most(memory.peak[0] - share) / 1e9, 3)
        measured.say("... host memory of the machine above the checkpoint, GB", (memory.peak[1] - size) / 1e9, 3)
        pause, _ = timed(mesh, lambda: model.snapshot(copies=True))
        measured.say("later background saves, pause in seconds", measured.most(pause))
        loads(measured, model, path, passes=1)
        measured.say(DIFFER, measured.sum(float(before != state_of(model, mesh))), 0)


def loads(measured: Measured, model: MegatronModel, path: Path, passes: int) -> None:
    """Load from the page cache `passes` times, and from the disk once, with sums of the tensors' bytes and without, in
    turns; say the medians."""
    for cached, where in ((True, "the page cache"), (False, "the disk")):
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for number in range(passes if cached else 1):
            for checks in (True, False) if number % 2 == 0 else (False, True):
                if not cached:
                    forget(path)
                measured.ranks.barrier()
                with nullcontext() if checks else without_sums():
                    taken, _ = timed(measured.mesh, lambda: model.load(path / "policy"))
                seconds[checks].append(measured.most(taken))
        for checks, values in seconds.items():
            if len(values) > 1 and measured.ranks.is_main:
                print("   ", *(f"{value:.2f}" for value in values), flush=True)
            measured.say(f"load from {where}{'' if checks else ' without sums'}, seconds", statistics.median(values))


def waited(measured: Measured, model: MegatronModel, root: Path, size: float, plain: float) -> None:
    with saved(measured, root) as begin, HostMemory() as memory:
        seconds, _ = timed(measured.mesh, lambda: begin(model, False).finish(wait=True))
        seconds = measured.most(seconds)
    measured.say("save that is waited for, seconds", seconds)
    measured.say("... GB a second", size / 1e9 / seconds, 3)
    measured.say("... share of plain writers", size / 1e9 / seconds / plain)
    measured.say("... host memory of a rank, GB", measured.most(memory.peak[0]) / 1e9, 3)


def way_back(
    mesh: Mesh, directory: Path, root: Path, tokens: int, samples: int, length: int, passes: int
) -> dict[str, float]:
    """Save once after a training step, then load `passes` times with sums and without; raises ValueError as `measure`."""
    measured = Measured(mesh)
    model = build(mesh, directory, "bfloat16", tokens)
    batch = random_batch(samples, length, model.spec.vocab).select(shard_of_replica(mesh.ranks, range(samples)))
    model.train_step(batch, OBJECTIVE.loss)
    size = sized(measured, model, root)
    before = state_of(model, mesh)
    with saved(measured, root) as begin:
        seconds, path = timed(mesh, lambda: begin(model, False).finish(wait=True))
        assert path is not None
        measured.say("save that is waited for, seconds", measured.most(seconds))
        measured.say("... GB a second", size / 1e9 / measured.most(seconds), 3)
        loads(measured, model, path, passes)
        measured.say(DIFFER, measured.sum(float(before != state_of(model, mesh))), 0)
    return measured.numbers


def pieces_of(model: MegatronModel, mesh: Mesh) -> list[Piece]:
    """What this rank writes."""
    with mesh.active():
        return dist_checkpoint.share_of(model._chunks, model._updater, mesh).pieces


def state_of(model: MegatronModel, mesh: Mesh) -> list[float]:
    """A number for each piece of this rank's parameters and moments, which changes when they do."""
    return [float(piece.values.double().abs().sum()) for piece in pieces_of(model, mesh)]


@contextmanager
def without_sums() -> Iterator[None]:
    """Lets loads check no sum of a tensor's bytes."""
    pieces = sharded_files._pieces_of
    sharded_files._pieces_of = lambda path: ((name, replace(stored, sums=None)) for name, stored in pieces(path))
    try:
        yield
    finally:
        sharded_files._pieces_of = pieces


def forget(path: Path) -> None:
    """Let the page cache have nothing of what was written: it is on the disk."""
    for file in path.rglob("*.safetensors"):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


# --- parts -----------------------------------------------------------------------------------------------------------


def checkpoint(part: Part, name: str, layout: str) -> None:
    sizes = (8192, 16, 2048) if part.large else (64, 8, 24)
    directory = part.model(name)
    with tempfile.TemporaryDirectory(prefix="checkpoint-speed-") as root:
        numbers = part.measure(f"{name} on {layout}", layout, measure, directory, Path(root), *sizes)
    if numbers is None:
        return
    compared(part, numbers)
    for key in ("first background save, pause in seconds", "later background saves, pause in seconds"):
        part.claim(f"{key}, below {PAUSE}", numbers[key] < PAUSE or not part.large, round(numbers[key], 2))
    rate = numbers["checkpoint, GB"] / numbers["save that is waited for, seconds"] / numbers["plain writers, GB a second"]
    fast = rate >= SHARE_OF_PLAIN or not part.large
    part.claim(f"share of plain writers, at least {SHARE_OF_PLAIN}", fast, round(rate, 2))


def compared(part: Part, numbers: dict[str, float]) -> None:
    exact = numbers[DIFFER] == 0
    part.claim("what was loaded is what was saved", exact, exact)
    for where in ("the disk", "the page cache"):
        added = numbers[f"load from {where}, seconds"] / numbers[f"load from {where} without sums, seconds"] - 1
        part.say(f"sums add to a load from {where}, %", round(100 * added, 1))


def sums(part: Part) -> None:
    """Qwen3-8B's shape on two GPUs, t2: what checking every byte adds to a load. The checkpoint has 115 GB."""
    sizes = (4096, 4, 1024) if part.large else (64, 8, 24)
    directory = part.model("qwen3_8b")
    with tempfile.TemporaryDirectory(prefix="checkpoint-speed-") as root:
        numbers = part.measure("qwen3_8b on t2", "t2", way_back, directory, Path(root), *sizes, 3)
    if numbers is not None:
        compared(part, numbers)


def one(part: Part) -> None:
    """Qwen3-1.7B's shape on one GPU."""
    checkpoint(part, "qwen3_1.7b", "d1")


def two(part: Part) -> None:
    """Qwen3-4B's shape on two GPUs, t2: about as many bytes a rank as Qwen3-8B has on four."""
    checkpoint(part, "qwen3_4b", "t2")


def four(part: Part) -> None:
    """Qwen3-8B's shape on four GPUs, d2t2."""
    checkpoint(part, "qwen3_8b", "d2t2")


PARTS: dict[str, Callable[[Part], None]] = {"one": one, "two": two, "four": four, "sums": sums}


if __name__ == "__main__":
    # Ranks find functions by the name of their module.
    from benchmarks import checkpoint_speed

    sys.exit(run(checkpoint_speed.__doc__, checkpoint_speed.PARTS))
