"""`fivefold doctor`: reports what this machine has for a run, what is wrong with it, and which features lack something."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fivefold import __version__
from fivefold.config.packages import EXTRAS, KERNELS, fits, import_fault, slower_paths, supported_versions
from fivefold.engines.sglang import arguments as sglang
from fivefold.engines.vllm import arguments as vllm
from fivefold.launch.processes import MOST_FILES, allow_open_files

SECONDS = {"driver": 20, "torch": 60, "trainer": 120, "vllm": 180, "sglang": 180, "ray": 60, "sandbox": 20, "disk": 60,
           "collective": 120}  # fmt: skip
"""Time limit of each probe in seconds."""
REQUIRED = ("torch", "megatron-core", "transformers", "safetensors", "tokenizers", "pyarrow")
_LEAST_FREE_GIB, _LEAST_SHM_GIB, _LEAST_FILES = 5, 1, 4096
_GIB = 2**30
_SHARED = Path("/dev/shm")  # noqa: S108


@dataclass
class Report:
    """Result of the checks; `faults` keep a plain run from starting, `notes` are worth reading."""

    versions: list[dict[str, Any]] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    probes: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: list[dict[str, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def doctor(options: argparse.Namespace) -> int:
    """Run the probes and print the report; return 0 if a plain run can start here, 1 otherwise. Progress goes to stderr."""
    report = examine(options.run_dir, options.seconds, partial(print, file=sys.stderr, flush=True))
    print(json.dumps(asdict(report), indent=1) if options.json else describe(report))
    return 1 if report.faults else 0


def examine(run_dir: Path, most_seconds: float | None = None, tell: Callable[[str], None] = lambda _: None) -> Report:
    """Return everything about this machine; `most_seconds`, if given, limits each probe."""
    report = Report()
    report.versions = _versions(report)
    report.machine = _machine(report)
    limits = {name: min(seconds, most_seconds or seconds) for name, seconds in SECONDS.items()}
    probes: dict[str, Sequence[str]] = {"driver": (), "torch": (), "trainer": (), "sandbox": (), "disk": (str(run_dir),)}
    probes |= {
        name: ()
        for name in ("vllm", "sglang", "ray")
        if any(one["name"] == name and one["found"] for one in report.versions)
    }
    report.probes = run_probes(probes, limits, tell)
    gpus = len(report.probes["torch"].get("gpus", []))
    if "error" not in report.probes["torch"]:
        # It runs alone because it measures.
        device = ("cuda", str(gpus)) if gpus else ("cpu", "2")
        report.probes |= run_probes({"collective": device}, limits, tell)
    _judge(report)
    return report


def run_probes(
    probes: Mapping[str, Sequence[str]], limits: Mapping[str, float], tell: Callable[[str], None] = lambda _: None
) -> dict[str, dict[str, Any]]:
    """Return the answers of probes that run in parallel; a probe that hangs is abandoned, even if it cannot be killed."""
    begin = time.monotonic()
    tell(f"asking {', '.join(f'{name} (at most {limits[name]:g} s)' for name in probes)}")
    command = [sys.executable, "-m", "fivefold.commands.probes"]
    running = {
        name: subprocess.Popen(
            [*command, name, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for name, arguments in probes.items()
    }
    answers = {}
    with ThreadPoolExecutor(len(running)) as waiting:
        waits = {waiting.submit(_answer, process, limits[name], begin): name for name, process in running.items()}
        for done in as_completed(waits):
            answers[waits[done]] = done.result()
            failed = f": {done.result()['error']}" if "error" in done.result() else ""
            tell(f"  {waits[done]:<12}{time.monotonic() - begin:6.1f} s{failed}")
    return {name: answers[name] for name in running}


def _answer(process: subprocess.Popen[bytes], limit: float, begin: float) -> dict[str, Any]:
    try:
        output, _ = process.communicate(timeout=max(0.1, begin + limit - time.monotonic()))
    except subprocess.TimeoutExpired:
        # Do not wait: a process inside a driver call ends only when the call returns, if ever.
        os.killpg(process.pid, signal.SIGKILL)
        return {"error": f"no answer within {limit:g} seconds"}
    try:
        answer: dict[str, Any] = json.loads(output)
    except ValueError:
        return {"error": f"it ended with {process.returncode} and no answer"}
    return answer


def _versions(report: Report) -> list[dict[str, Any]]:
    """Return name, version and supported versions of Python and the packages; unsupported required packages are faults."""
    wanted = _supported()
    rows: list[dict[str, Any]] = [{"name": "python", "found": platform.python_version(), "supported": wanted["python"]}]
    for name in (*REQUIRED, "vllm", "sglang", "ray"):
        version = vllm.installed_version() if name == "vllm" else _installed(name)
        rows.append({"name": name, "found": version, "supported": wanted.get(name, "")})
    for row in rows:
        name, version, supported = row["name"], row["found"], row["supported"]
        row["fits"] = None if version is None else fits(version, supported)
        if version is None and name in REQUIRED:
            report.faults.append(f"{name} is not installed: pip install '{name}{supported}'")
        elif row["fits"] is False:
            text = f"{name} {version} is installed, supported is {supported}: pip install '{name}{supported}'"
            (report.faults if name in ("python", *REQUIRED) else report.notes).append(text)
    return rows


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _supported() -> dict[str, str]:
    """Return package -> supported versions.

    They come from Fivefold's requirements; engines without a fixed extra use the versions in their own modules.
    """

    def between(first: tuple[int, ...], last: tuple[int, ...]) -> str:
        following = (*last[:-1], last[-1] + 1)
        return f">={'.'.join(map(str, first))},<{'.'.join(map(str, following))}"

    ranges = {"python": ">=3.11", "vllm": between(*vllm.VERSIONS), "sglang": between(*sglang.VERSIONS)}
    return supported_versions() | ranges


def _machine(report: Report) -> dict[str, Any]:
    """Return the host and its limits for processes."""
    files = allow_open_files()
    machine: dict[str, Any] = {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "open_files": files,
        "shm_gib": None,
    }
    if files < _LEAST_FILES:
        report.notes.append(f"{files} open files are few for many ranks and servers: raise the hard limit to {MOST_FILES}")
    if _SHARED.is_dir():
        size = os.statvfs(_SHARED)
        machine["shm_gib"] = round(size.f_blocks * size.f_frsize / _GIB, 2)
        if machine["shm_gib"] < _LEAST_SHM_GIB:
            report.notes.append(
                f"{_SHARED} has {machine['shm_gib']} GiB, which NCCL and vLLM share tensors in: docker run --shm-size=16g"
            )
    return machine


def _judge(report: Report) -> None:
    probes, faults, notes = report.probes, report.faults, report.notes
    torch, driver = probes["torch"], probes["driver"]
    for name in ("torch", "trainer", "collective", "disk"):
        if "error" in probes.get(name, {}):
            faults.append(f"{name}: {probes[name]['error']}")
    for name in ("driver", "sandbox", "vllm", "sglang", "ray"):
        if "error" in probes.get(name, {}):
            notes.append(f"{name}: {probes[name]['error']}")
    gpus = driver.get("gpus", [])
    if "error" not in torch and len(torch["gpus"]) < len(gpus) and "CUDA_VISIBLE_DEVICES" not in os.environ:
        why = "is a build for CPUs" if torch["cuda"] is None else f"with CUDA {torch['cuda']} sees {len(torch['gpus'])}"
        faults.append(f"the driver has {len(gpus)} GPUs, torch {torch['version']} {why}: install torch for this driver")
    if "error" not in torch and 0 < len(torch["gpus"]) < len(gpus) and "CUDA_VISIBLE_DEVICES" in os.environ:
        visible = os.environ["CUDA_VISIBLE_DEVICES"]
        notes.append(f"{len(torch['gpus'])} of this machine's {len(gpus)} GPUs are visible: CUDA_VISIBLE_DEVICES={visible}")
    disk = probes["disk"]
    if disk.get("free_gib", _LEAST_FREE_GIB) < _LEAST_FREE_GIB:
        faults.append(f"{disk['path']} has {disk['free_gib']} GiB free, a run's checkpoints take more: free some")
    if reason := probes["sandbox"].get("missing"):
        report.missing.append({"for": "rewards code and code_fraction", "needs": str(reason)})
    report.missing += [
        {"for": extra.serves, "needs": f"pip install 'fivefold[{extra.name}]'"}
        for extra in EXTRAS
        if (vllm.installed_version() if extra.name == "vllm" else _installed(extra.package)) is None
    ]
    # Engines and Ray have their own probes.
    apart = {*probes, *(extra.name for extra in EXTRAS if extra.module in KERNELS)}
    extras = [extra for extra in EXTRAS if extra.name not in apart and _installed(extra.package) is not None]
    notes += slower_paths(is_fresh=True)
    with ThreadPoolExecutor() as tries:
        for extra, fault in zip(
            extras, tries.map(partial(import_fault, is_fresh=True), [extra.module for extra in extras]), strict=True
        ):
            if fault is not None:
                notes.append(f"{extra.package} is installed, {fault}: without it there is no {extra.serves}")
    if sglang.installed_version() is None:
        command = "pip install sglang, in an environment of its own: docs/engines.md#sglang"
        report.missing.append({"for": "engine.backend: sglang", "needs": command})
    if gpus and _installed("transformer-engine") is None:
        command = "pip install --no-build-isolation 'transformer_engine[pytorch]'"
        report.missing.append({"for": "policy.megatron.transformer_impl: transformer_engine", "needs": command})


def describe(report: Report) -> str:
    """Return the report as text."""
    machine, probes = report.machine, report.probes
    lines = [f"fivefold {__version__} on {machine['host']}: {machine['system']}, {machine['cores']} cores", "", "versions"]
    for row in report.versions:
        verdict = {None: "-", True: "ok", False: "not supported"}[row["fits"]]
        lines.append(f"  {row['name']:<14} {row['found'] or 'not installed':<16} {verdict:<14} {row['supported']}".rstrip())
    torch, driver, disk = probes["torch"], probes["driver"], probes["disk"]
    built = [
        f"{library} {torch[key]}"
        for library, key in (("CUDA", "cuda"), ("cuDNN", "cudnn"), ("NCCL", "nccl"))
        if torch.get(key)
    ]
    lines += [f"  torch was built with {', '.join(built)}"] if built else []
    lines += ["", "devices"]
    lines += [f"  driver {driver['version']}"] if driver.get("version") else []
    for number, gpu in enumerate(torch.get("gpus") or driver.get("gpus", [])):
        lines.append(f"  GPU {number}: {gpu['name']}, {gpu['memory_gib']} GiB")
    if not (torch.get("gpus") or driver.get("gpus")):
        lines.append("  no GPU: runs are computed on the CPU")
    lines += [f"  link {kind}: {' '.join(pairs)}" for kind, pairs in driver.get("links", {}).items()]
    if len(torch.get("gpus", [])) > 1:
        lines.append(f"  direct access between GPUs: {' '.join(torch['peers']) or 'none'}")
    if (reduced := probes.get("collective", {})).get("ranks"):
        speed = f", {reduced['bus_gb_s']} GB/s of bus bandwidth with {reduced['mib']} MiB" if reduced["ranks"] > 1 else ""
        lines.append(f"  all-reduce over {reduced['backend']} between {reduced['ranks']}: right{speed}")
    lines += ["", "this machine"]
    if "free_gib" in disk:
        lines.append(f"  disk {disk['path']}: {disk['free_gib']} GiB free, writes {disk['write_mb_s']} MB/s")
    if machine["shm_gib"] is not None:
        lines.append(f"  shared memory {machine['shm_gib']} GiB")
    lines.append(f"  open files {machine['open_files']}")
    if probes["sandbox"].get("layers"):
        lines.append(f"  programs of code rewards are locked up by {probes['sandbox']['layers']}")
    lines += [f"  {name} can be imported" for name in ("vllm", "sglang", "ray") if "module" in probes.get(name, {})]
    if report.missing:
        lines += ["", "what is missing for what", *(f"  {row['for']:<52} {row['needs']}" for row in report.missing)]
    lines.append("")
    lines += [f"note     {note}" for note in report.notes]
    lines += [f"error    {fault}" for fault in report.faults]
    lines.append("a plain run can start here" if not report.faults else "no run can start here")
    return "\n".join(lines)
