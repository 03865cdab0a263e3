"""Weight sync: the policy's newest weights -> the engine, and who has the device meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fivefold.interfaces import Engine, Model


def weight_sync(policy: Model, engine: Engine | None) -> None:
    """Give the engine the policy's weights, unless it has them already or there is none. Collective."""
    while engine is not None and engine.version != policy.version:
        # Parameters that were away come back while the engine takes its memory.
        weights = policy.weights()
        engine.wake()
        engine.update_weights(weights, policy.version)


@contextmanager
def sleeping_after(engine: Engine | None) -> Iterator[None]:
    """Let the engine leave the device at the end."""
    yield
    if engine is not None:
        engine.sleep()
