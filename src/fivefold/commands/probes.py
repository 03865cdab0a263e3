"""Probes of `fivefold doctor`, each in its own process: `python -m fivefold.commands.probes NAME`.

A probe prints one JSON object, its answer or an `error`. A driver or file system that hangs blocks only its own probe.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from fivefold.errors import RunError, UserError, first_line, sentence_of, shown

Answer = dict[str, Any]
_MIB = 2**20
_REDUCED = {"cuda": 1024 * _MIB, "cpu": 8 * _MIB}
"""Bytes of the all-reduce that is timed."""
_WRITTEN = 64 * _MIB
_ROUNDS = 8
_MINUTES = 5.0
"""Longest time in minutes that a rank of `collective` waits for another one."""
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def driver() -> Answer:
    """Return GPUs and links as nvidia-smi lists them; empty if it is not installed."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return {}
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    output = _output(query)
    rows = [line.split(", ") for line in output.splitlines()]
    if any(len(row) != 3 or not row[1].isdecimal() for row in rows):
        raise UserError(f"nvidia-smi must list name, memory and driver of each GPU: got {shown(output)}")
    links = topology(_output([tool, "topo", "-m"])) if len(rows) > 1 else {}
    return {
        "version": rows[0][2] if rows else None,
        "gpus": [{"name": name, "memory_gib": round(int(mib) / 1024, 1)} for name, mib, _ in rows],
        "links": links,
    }


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise RunError(
            f"{Path(command[0]).name} ended with {done.returncode}: {lines[0] if lines else 'it printed nothing'}"
        )
    return done.stdout


def topology(text: str) -> dict[str, list[str]]:
    """Return kind of link (NV18, PIX, SYS, ...) -> pairs of GPUs with it, from the matrix of `nvidia-smi topo -m`."""
    lines = [_ANSI.sub("", line).split("\t") for line in text.splitlines()]
    head = next((line for line in lines if any(cell.strip() == "GPU0" for cell in line)), [])
    columns = {place: cell.strip() for place, cell in enumerate(head) if re.fullmatch(r"GPU\d+", cell.strip())}
    links: dict[str, list[str]] = {}
    for line in lines:
        row = line[0].strip()
        if line is head or not re.fullmatch(r"GPU\d+", row):
            continue
        for place, column in columns.items():
            if int(column[3:]) > int(row[3:]) and place < len(line):
                links.setdefault(line[place].strip(), []).append(f"{row[3:]}-{column[3:]}")
    return links


def torch_devices() -> Answer:
    """Return torch's version, its build options, and the devices that it can compute on."""
    import torch

    answer: Answer = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": [], "peers": []}
    if torch.version.cuda is not None:
        answer["cudnn"] = torch.backends.cudnn.version()
        with contextlib.suppress(AttributeError, RuntimeError):
            answer["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device in range(count):
        properties = torch.cuda.get_device_properties(device)
        # Run a kernel: only this shows that the build lacks code for this GPU.
        ones = torch.ones(16, device=f"cuda:{device}").sum().item()
        assert ones == 16, ones
        answer["gpus"].append(
            {
                "name": properties.name,
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "capability": f"{properties.major}.{properties.minor}",
            }
        )
    answer["peers"] = [
        f"{a}-{b}" for a in range(count) for b in range(a + 1, count) if torch.cuda.can_device_access_peer(a, b)
    ]
    return answer


def trainer() -> Answer:
    """Check that the trainer's modules can be imported: Megatron-Core and its dependencies."""
    import fivefold.megatron.model

    return {"module": fivefold.megatron.model.__name__}


def vllm() -> Answer:
    """Check that vLLM can be imported with its compiled parts."""
    from fivefold.engines.vllm.loaded import load

    return {"module": load()}


def sglang() -> Answer:
    """Check that SGLang can be imported."""
    import fivefold.engines.sglang.receiver

    return {"module": fivefold.engines.sglang.receiver.__name__}


def ray() -> Answer:
    """Check that Ray can be imported."""
    import fivefold.launch.ray.cluster

    return {"module": fivefold.launch.ray.cluster.__name__}


def sandbox() -> Answer:
    """Return what confines programs that a model wrote, or why nothing does."""
    from fivefold.reward.code.confine import layers, missing

    reason = missing()
    return {"missing": reason, "layers": None if reason else layers()}


def disk(directory: str) -> Answer:
    """Return the free space where a run would write, and the write speed."""
    path = next(one for one in (Path(directory).absolute(), *Path(directory).absolute().parents) if one.is_dir())
    answer: Answer = {"path": str(path), "free_gib": round(shutil.disk_usage(path).free / 2**30, 1)}
    block = os.urandom(_MIB)
    with tempfile.TemporaryFile(dir=path) as file:
        begin = time.perf_counter()
        for _ in range(_WRITTEN // _MIB):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        answer["write_mb_s"] = round(_WRITTEN / 1e6 / (time.perf_counter() - begin))
    return answer


def collective(device: str, count: str) -> Answer:
    """Time an all-reduce between `count` processes, one per device; return bus bandwidth as NCCL's tests define it."""
    world = int(count)
    with tempfile.TemporaryDirectory() as directory:
        return _collective(device, world, directory)


def _collective(device: str, world: int, directory: str) -> Answer:
    command = [sys.executable, "-m", __spec__.name if __spec__ else __name__]
    ranks = [
        subprocess.Popen([*command, "rank", device, str(rank), str(world), directory], stdout=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    answers: list[Answer] = [{}] * world
    with ThreadPoolExecutor(world) as readers:
        # Read answers as they finish: the first rank that fails has the cause, and the others wait for it.
        numbers = {readers.submit(process.communicate): number for number, process in enumerate(ranks)}
        for done in as_completed(numbers):
            number = numbers[done]
            answers[number] = json.loads(done.result()[0] or "{}")
            if "error" in answers[number] or ranks[number].returncode:
                for process in ranks:
                    process.kill()
                return {"error": f"rank {number}: {answers[number].get('error', f'ended with {ranks[number].returncode}')}"}
    speed = min(one["bus_gb_s"] for one in answers)
    return {"backend": answers[0]["backend"], "ranks": world, "mib": _REDUCED[device] // _MIB, "bus_gb_s": speed}


def rank(device: str, number: str, count: str, directory: str) -> Answer:
    """Run one process of `collective`."""
    import torch
    import torch.distributed as dist

    from fivefold.distributed.ports import on_one_machine
    from fivefold.distributed.rendezvous import join

    index, world = int(number), int(count)
    where = torch.device(device, index) if device == "cuda" else torch.device("cpu")
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        if index >= torch.cuda.device_count():
            raise UserError(f"GPU {index} must be visible: there are {torch.cuda.device_count()}")
        torch.cuda.set_device(where)
    else:
        torch.set_num_threads(1)
    os.environ.update(RANK=number, WORLD_SIZE=count, **on_one_machine(Path(directory)))
    join(backend, _MINUTES)
    values = torch.full((_REDUCED[device] // 4,), float(index + 1), device=where)
    dist.all_reduce(values)
    total, extremes = world * (world + 1) / 2, (values.min().item(), values.max().item())
    if extremes != (total, total):
        raise RunError(f"the sum of 1 to {world} came out between {extremes[0]} and {extremes[1]}")
    seconds = []
    for _ in range(_ROUNDS):
        # The first collectives set up channels.
        dist.barrier()
        begin = _now(device)
        dist.all_reduce(values)
        seconds.append(_now(device) - begin)
    dist.destroy_process_group()
    return {"backend": backend, "bus_gb_s": round(2 * (world - 1) / world * _REDUCED[device] / 1e9 / min(seconds), 2)}


def _now(device: str) -> float:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


PROBES: dict[str, Callable[..., Answer]] = {
    "driver": driver,
    "torch": torch_devices,
    "trainer": trainer,
    "vllm": vllm,
    "sglang": sglang,
    "ray": ray,
    "sandbox": sandbox,
    "disk": disk,
    "collective": collective,
    "rank": rank,
}


def main() -> None:
    """Answer on the original stdout; what libraries print goes to stderr."""
    answers = os.dup(1)
    os.dup2(2, 1)
    name, *arguments = sys.argv[1:]
    try:
        answer = PROBES[name](*arguments)
    except BaseException as error:
        answer = {"error": sentence_of(error) or f"{type(error).__name__}: {first_line(error)}"}
    os.write(answers, json.dumps(answer).encode())
    os._exit("error" in answer)


if __name__ == "__main__":
    main()
