"""Weight sync: the policy's newest weights -> the engine."""

from __future__ import annotations

from fivefold.interfaces import Engine, Model


def weight_sync(policy: Model, engine: Engine | None) -> None:
    """Give the engine the policy's weights, unless it has them already or there is none. Collective."""
    if engine is not None and engine.version != policy.version:
        engine.update_weights(policy.weights(), policy.version)
