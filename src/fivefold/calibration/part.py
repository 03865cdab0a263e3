"""Measures one part of a calibration in this process: `python -m fivefold.calibration.part NAME DEADLINE`.

It reads the rates measured so far as JSON, and prints an object for each result as soon as it is measured: a `Rate`, a
`note` of what is left out, or a `fault`. The deadline is a time of the monotonic clock, which processes share.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import torch

from fivefold.calibration import kernels
from fivefold.calibration.kernels import Clock
from fivefold.config.packages import flash_fault
from fivefold.distributed.compiler_caches import use_compiler_caches
from fivefold.errors import UserError, first_line
from fivefold.plan.devices import local_gpu_kind
from fivefold.plan.efficiency import Efficiencies, known_rates
from fivefold.plan.measured import Rate

Found = tuple[str, float, float]
"""(kind, size, rate)"""


def measure(part: str, clock: Clock, earlier: Sequence[Rate], tell: Callable[[str], None]) -> Iterator[Rate]:
    """Yield the rates of a part of `machine.PARTS`; raises ValueError if this machine's GPU is not in the table of GPUs."""
    hardware = local_gpu_kind() if clock.is_large else "cpu"
    if hardware is None:
        raise UserError(
            f"this machine's GPU must be in the table of GPUs: got {torch.cuda.get_device_name()}; "
            "add its row to config/gpus.py"
        )
    source = f"fivefold plan --calibrate, {datetime.date.today()}, torch {torch.__version__}, {hardware}"
    rows, has_flash = list(earlier), flash_fault() is None
    for kind, size, rate in _part(part, clock, lambda: Efficiencies(known_rates(rows), hardware, has_flash), tell):
        rows.append(Rate(kind, size, float(f"{rate:.4g}"), hardware, source))
        yield rows[-1]


def _part(part: str, clock: Clock, rates: Callable[[], Efficiencies], tell: Callable[[str], None]) -> Iterator[Found]:
    """Run the measurements of a part; `rates` returns the rates measured by then."""
    if part == "kernels":
        yield from kernels.products(clock)
        yield from kernels.optimizer(clock)
        yield from kernels.copies(clock)
    elif part == "links":
        from fivefold.calibration.links import links

        yield from links(clock)
    else:
        # This imports the trainer, which the ranks of `links` do not need, although they import this module too.
        from fivefold.calibration.layers import layers

        yield from layers(clock, rates, tell)


def main() -> None:
    """Measure one part and print results to the original stdout; output of libraries goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if fault := use_compiler_caches():
        print(f"warning  {fault}", file=sys.stderr)
    part, deadline = sys.argv[1:]
    earlier = [Rate(**row) for row in json.load(sys.stdin)]

    def say(answer: dict[str, object]) -> None:
        print(json.dumps(answer), file=answers)

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        for row in measure(part, Clock(device, float(deadline)), earlier, lambda text: say({"note": text})):
            say(asdict(row))
    except Exception as error:
        say({"fault": f"{type(error).__name__}: {first_line(error)}"})


if __name__ == "__main__":
    main()
