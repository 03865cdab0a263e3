"""Terms, whose sum is the loss of an update, and process rewards: a new term is a class in a file here.

Its fields become keys of the configuration. No torch is imported before a term computes.
"""

from __future__ import annotations

from fivefold.algo.part import Part, find_classes
from fivefold.algo.term import Term

CLASSES = tuple(find_classes(__name__, list(__path__), Part))
"""Every class with keys in this package."""
TERMS = tuple(part for part in CLASSES if issubclass(part, Term))
"""Terms of the loss, next to the policy gradient itself."""
