"""Weight sync: the policy's newest weights -> the engine, and who has the device meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fivefold.interfaces import Engine, Model


def weight_sync(policy: Model, engine: Engine | None) -> bool:
    """Give the engine the policy's weights, unless it has them already or there is none; whether it was given any.
    Collective."""
    is_sent = False
    while engine is not None and engine.version != policy.version:
        if engine.version < 0:
            # Before parameters are on their way: it waits for the device.
            give_back_memory()
        # Parameters that were away come back while the engine takes its memory.
        weights = policy.weights()
        engine.wake()
        engine.update_weights(weights, policy.version)
        is_sent = True
    return is_sent


def give_back_memory() -> None:
    """Let the driver have what torch keeps for later: an engine that wakes asks the driver. Waits for the device."""
    torch.cuda.empty_cache()


def crossed_off(weights: Iterator[tuple[str, Tensor]], missing: set[str]) -> Iterator[tuple[str, Tensor]]:
    """The same, while the names that come are taken out of `missing`."""
    for name, tensor in weights:
        missing.discard(name)
        yield name, tensor


def not_come(missing: set[str], expected: Sequence[str]) -> list[str]:
    """What is wrong where tensors are missing."""
    if not missing:
        return []
    return [f"{len(missing)} of {len(expected)} tensors did not come, the first: {sorted(missing)[:3]}"]


@contextmanager
def sleeping_after(engine: Engine | None) -> Iterator[None]:
    """Let the engine leave the device at the end."""
    yield
    if engine is not None:
        engine.sleep()
