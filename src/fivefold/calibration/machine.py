"""All measurements of this machine within a time: device -> Rates in a file."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from fivefold.calibration.kernels import Clock, copies, optimizer, products
from fivefold.calibration.layers import layers
from fivefold.calibration.links import links
from fivefold.config.packages import has_flash_attention
from fivefold.plan.devices import local_gpu_kind
from fivefold.plan.efficiency import CALIBRATION, Efficiencies, Rate, load_rates, write_calibration

Found = tuple[str, float, float]
"""(kind, size, rate)"""


def calibrate(path: Path | None = None, seconds: float = 120.0, tell: Callable[[str], None] = print) -> Path:
    """Measure what there is time for and keep it; the file. Kinds that are not measured keep the rates that came with us.

    Raises ValueError where this machine's GPU is not in the table of GPUs.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    hardware = "cpu" if device.type == "cpu" else local_gpu_kind()
    if hardware is None:
        raise ValueError(
            f"this machine's GPU must be in the table of GPUs: got {torch.cuda.get_device_name()}; "
            "add its row to config/gpus.py"
        )
    about = f"{datetime.date.today()}, torch {torch.__version__}, {hardware}"
    source = f"fivefold plan --calibrate, {about}"
    clock = Clock(device, time.monotonic() + seconds)
    rows, has_flash = list[Rate](), has_flash_attention()
    for kind, size, rate in _everything(clock, lambda: Efficiencies([*load_rates(), *rows], hardware, has_flash)):
        rows.append(Rate(kind, size, float(f"{rate:.4g}"), hardware, source))
        tell(f"{kind:<26}{size:>14,.0f}{rate:>14,.4g}")
    path = (path or CALIBRATION).expanduser()
    write_calibration(path, rows, about)
    return path


def _everything(clock: Clock, rates: Callable[[], Efficiencies]) -> Iterator[Found]:
    """`rates` gives those that are measured by then: later ones are what earlier ones leave of a whole."""
    yield from products(clock)
    yield from optimizer(clock)
    yield from copies(clock)
    yield from layers(clock, rates)
    yield from links(clock)
