"""Weight sync: sends the policy's latest weights to the engine, and manages who uses the device memory meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fivefold.interfaces import Engine, EngineState, Model


def weight_sync(policy: Model, engine: Engine | None) -> bool:
    """Sends the policy's weights to the engine, if there is one and its weights are outdated; returns whether any were sent.
    Collective."""
    is_sent = False
    while engine is not None and (engine.state is not EngineState.READY or engine.version != policy.version):
        if engine.state is not EngineState.READY:
            # Must come before parameters are moved, since it waits for the device.
            give_back_memory()
        # Offloaded parameters return while the engine allocates its memory.
        weights = policy.weights()
        engine.restart()
        engine.wake()
        engine.update_weights(weights, policy.version)
        is_sent = True
    return is_sent


def give_back_memory() -> None:
    """Return torch's cached memory to the driver, from which a waking engine allocates. Waits for the device."""
    torch.cuda.empty_cache()


def crossed_off(weights: Iterator[tuple[str, Tensor]], missing: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights unchanged, and removes their names from `missing`."""
    for name, tensor in weights:
        missing.discard(name)
        yield name, tensor


def not_come(missing: set[str], expected: Sequence[str]) -> list[str]:
    """Returns a message if tensors are missing, in a list."""
    if not missing:
        return []
    return [f"{len(missing)} of {len(expected)} tensors did not come, the first: {sorted(missing)[:3]}"]


@contextmanager
def sleeping_after(engine: Engine | None) -> Iterator[None]:
    """Puts the engine to sleep at the end of this context."""
    yield
    if engine is not None:
        engine.sleep()
