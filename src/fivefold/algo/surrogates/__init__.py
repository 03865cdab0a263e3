"""The surrogates, found by their names: a new one is a class in a file here. No torch is imported before one computes."""

from __future__ import annotations

from typing import Any

from fivefold.algo.part import find_classes
from fivefold.algo.surrogate import Surrogate

SURROGATES = {kind.name: kind for kind in find_classes(__name__, __path__, Surrogate) if "name" in vars(kind)}
"""Name -> class of the surrogate."""
PARAMETERS = tuple(dict.fromkeys(key for kind in SURROGATES.values() for key in kind.parameters()))
"""Keys of `algorithm` that are parameters of surrogates."""


def surrogate_class(surrogate: str) -> type[Surrogate]:
    """Return the class for a surrogate's name; for `path.py:function` the base, which has the usual attributes."""
    return SURROGATES.get(surrogate, Surrogate)


def make_surrogate(name: str, **numbers: Any) -> Surrogate:
    """Return the surrogate `name`. Parameters that are left out or None have their defaults."""
    return SURROGATES[name](**{key: value for key, value in numbers.items() if value is not None})
