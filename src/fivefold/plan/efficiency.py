"""Measured speed of each kind of kernel, link and host: (kind, size) -> rate. No torch here.

The rows are in `measured.py`. A file written by `fivefold plan --calibrate` has the same form and replaces them kind by
kind.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Literal

from fivefold.config.gpus import FLASH_CAPABILITY, GPUS
from fivefold.errors import UserError, shown
from fivefold.files import read_json
from fivefold.plan.measured import MEASURED, Rate

Bound = Literal["arithmetic", "memory", "link", "host"]
Unit = Literal["TFLOP/s", "GB/s", "us"]
CALIBRATION = Path("~/.cache/fivefold/calibration.json")
"""File where `fivefold plan --calibrate` stores its result, and where `plan` and `check` look for one."""
UNITS = {"TFLOP/s": 1e12, "GB/s": 1e9, "us": 1e-6}


@dataclass(frozen=True)
class Kind:
    """Meaning of the rows of one kind."""

    unit: Unit
    """Unit of the rate; `us` is a time, the others are amounts per second."""
    bound: Bound
    """Property of a GPU with which the rate scales; host times do not scale."""
    size: str
    """Quantity that the row's size counts; empty if the kind has one row."""
    amount: str
    """Quantity that the rate counts."""


KINDS: dict[str, Kind] = {
    "gemm": Kind("TFLOP/s", "arithmetic", "smallest of the product's three dimensions", "2 per multiplication"),
    "grouped_gemm": Kind("TFLOP/s", "arithmetic", "tokens of an expert", "2 per multiplication, activation included"),
    "attention_forward": Kind("TFLOP/s", "arithmetic", "length", "flash-attn-4, causal: half of the square"),
    "attention_backward": Kind("TFLOP/s", "arithmetic", "length", "flash-attn-4, 2.5 times the forward"),
    "torch_attention_forward": Kind("TFLOP/s", "arithmetic", "length", "torch's own, causal: half of the square"),
    "torch_attention_backward": Kind("TFLOP/s", "arithmetic", "length", "torch's own, 2.5 times the forward"),
    "elementwise": Kind("GB/s", "memory", "", "what norms, residuals and copies read and write"),
    "heads": Kind("GB/s", "memory", "heads of a rank", "queries, keys and values apart, normed, rotated: read and written"),
    "swiglu": Kind("GB/s", "memory", "", "what activations read and write"),
    "head_forward": Kind("GB/s", "memory", "", "4 bytes a logit"),
    "head_backward": Kind("GB/s", "memory", "", "6 bytes a logit"),
    "adam": Kind("GB/s", "memory", "", "34 bytes a parameter"),
    "gradients": Kind("GB/s", "memory", "", "float32 gradients added to, set to zero, measured, scaled"),
    "node_link": Kind("GB/s", "link", "bytes of a message", "bus bandwidth of all-gather and reduce-scatter in a node"),
    "node_exchange": Kind("GB/s", "link", "bytes of a message", "what leaves a rank in an all-to-all or send in a node"),
    "host_copy": Kind("GB/s", "host", "", "pinned host memory to the GPU or back"),
    "host_adam": Kind(
        "GB/s", "host", "", "40 bytes a parameter of the host's Adam, with norm and clipping, by a rank's cores"
    ),
    "layer_host": Kind("us", "host", "", "launching forward and backward of a layer"),
    "tensor_host": Kind("us", "host", "", "more of it with tensor parallelism"),
    "context_host": Kind("us", "host", "", "more of it with context parallelism"),
    "expert_host": Kind("us", "host", "", "more of it with experts, during which the GPU waits for counts of tokens"),
    "fsdp_host": Kind("us", "host", "", "more of it on `fsdp:` layouts: FSDP's hooks, and transformers' layer"),
    "update_host": Kind("us", "host", "", "an optimizer step besides its kernels"),
    "decode_memory": Kind("GB/s", "memory", "", "weights, keys and values read while decoding"),
    "shared_decode_memory": Kind("GB/s", "memory", "", "the same where several of vLLM's processes share a GPU"),
    "decode_host": Kind("us", "host", "", "a step of vLLM"),
    "sequence_host": Kind("us", "host", "sequences of a process", "a sequence in a step of vLLM"),
    "logprob_host": Kind("us", "host", "", "a sequence in a step, more where workers collect its log-probs"),
    "object_host": Kind(
        "us", "host", "sequences of a process", "a sequence in a step, more where vLLM makes objects of its log-probs"
    ),
    "server_host": Kind("us", "host", "", "a sequence in a step, more where the engine is a server"),
    "eager_layer": Kind("us", "host", "", "a layer of a decoding step of the transformers engine"),
    "decode_reduce": Kind("us", "host", "", "an all-reduce of a decoding step"),
    "wake": Kind("us", "host", "", "an engine waking with weights and cache, and its hand-over"),
}

_FLASH = ("attention_forward", "attention_backward")


class Efficiencies:
    """Rates for one kind of GPU: measured on it, or scaled from another GPU by the data sheets."""

    def __init__(self, rows: Iterable[Rate], gpu: str, has_flash: bool = True) -> None:
        """Select rates for `gpu`; `has_flash`: flash-attn-4 is installed, which GPUs from Hopper on use."""
        self.gpu, self._rows = gpu, tuple(rows)
        self._has_flash = has_flash and flash_runs_on(gpu)
        self._tables = {kind: self._table(kind) for kind in KINDS}

    @cached_property
    def sources(self) -> dict[str, str]:
        """Return the hardware on which the rates of each kind were measured."""
        return {kind: rows[0].hardware for kind in KINDS if (rows := self._of(kind))}

    @cached_property
    def measured_here(self) -> bool:
        """Return whether every kind of compute kernel was measured on this GPU itself."""
        used = {self.in_use(kind) for kind in KINDS if KINDS[kind].bound in ("arithmetic", "memory")}
        used -= {f"torch_{kind}" for kind in _FLASH if self._has_flash}
        return all(self.sources[kind] == self.gpu for kind in used)

    def in_use(self, kind: str) -> str:
        """Return the kind of kernel that is used here for `kind`: without flash-attn-4, torch's own attention."""
        return f"torch_{kind}" if kind in _FLASH and not self._has_flash else kind

    def _of(self, kind: str) -> list[Rate]:
        rows = [row for row in self._rows if row.kind == kind]
        measured_here = [row for row in rows if row.hardware == self.gpu]
        return measured_here or [row for row in rows if row.hardware != "cpu"] or rows

    def _table(self, kind: str) -> list[tuple[float, float]]:
        """Return (log of size, rate in units of 1) pairs, in order of size."""
        points = []
        for row in self._of(kind):
            scale = _scale(KINDS[kind].bound, row.hardware, self.gpu) * UNITS[KINDS[kind].unit]
            points.append((math.log(max(row.size, 1.0)), row.rate * scale))
        if not points:
            raise UserError(f"no rate of {kind} is known: run `fivefold plan --calibrate` on the machine in question")
        return sorted(points)

    def rate(self, kind: str, size: float = 0.0) -> float:
        """Return FLOP/s, bytes/s or seconds for a size.

        Between measured sizes, the rate is interpolated by their logarithm; beyond them, it is that of the nearest size.
        """
        table = self._tables[self.in_use(kind)]
        if len(table) == 1 or size <= 1:
            return table[0][1]
        place = math.log(size)
        if place <= table[0][0]:
            return table[0][1]
        for (low, slow), (high, fast) in pairwise(table):
            if place <= high:
                return slow + (fast - slow) * (place - low) / (high - low)
        return table[-1][1]


def flash_runs_on(gpu: str) -> bool:
    """Return whether flash-attn-4 supports this GPU."""
    return gpu in GPUS and GPUS[gpu].capability >= FLASH_CAPABILITY


def _scale(bound: Bound, measured: str, wanted: str) -> float:
    """Return the factor from a rate measured on one GPU to another GPU, by what bounds the kernel."""
    if bound == "host" or measured == wanted or measured not in GPUS or wanted not in GPUS:
        return 1.0
    attribute = {"arithmetic": "tflops", "memory": "memory_gb_s", "link": "link_gb_s"}[bound]
    return float(getattr(GPUS[wanted], attribute) / getattr(GPUS[measured], attribute))


def load_rates(calibration: Path | None = None) -> tuple[Rate, ...]:
    """Return the rows that come with Fivefold; rows of a calibration file replace those of the same kind and hardware.

    The default is the calibration file of this machine, if there is one.
    """
    path = CALIBRATION.expanduser() if calibration is None else calibration
    return known_rates(() if calibration is None and not path.is_file() else read_calibration(path))


def known_rates(rates: Iterable[Rate]) -> tuple[Rate, ...]:
    """Return `rates`, plus the rows that come with Fivefold for kinds that `rates` lacks on the same hardware."""
    rates = tuple(rates)
    replaced = {(row.kind, row.hardware) for row in rates}
    return (*(row for row in MEASURED if (row.kind, row.hardware) not in replaced), *rates)


def read_calibration(path: Path) -> tuple[Rate, ...]:
    """Return the rows of a file written by `write_calibration`; raise ValueError for any other file."""
    content = read_json(path)
    rows = content.get("rates") if isinstance(content, dict) else None
    try:
        rates = tuple(Rate(**row) for row in rows or [])
    except TypeError:
        rates = ()
    if not rates:
        raise UserError(f"{path} is not a file of `fivefold plan --calibrate`: it must have a list `rates` of measured rows")
    for row in rates:
        numbers = isinstance(row.size, int | float) and isinstance(row.rate, int | float)
        if row.kind not in KINDS or not numbers or not 0 < row.rate < math.inf:
            raise UserError(f"{path} has a row that cannot be used: got {shown(asdict(row))}; measure again")
    return rates


def write_calibration(path: Path, rows: Iterable[Rate], about: str) -> None:
    """Store measured rows as JSON; `about` names the date and the machine of the measurement."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": about, "rates": [asdict(row) for row in rows]}, indent=1) + "\n")
