"""Domains of a data set: their data_sources, and the number of prompts from each per step. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fivefold.errors import UserError

OTHERS = "*"
"""Entry in a domain's data_sources that stands for every one that no domain names."""


def domains_of(domains: Mapping[str, Sequence[str]]) -> Callable[[str], str]:
    """Return data_source -> domain. A data_source that no domain names is a domain of its own, unless a domain has `*`."""
    named = {source: domain for domain, sources in domains.items() for source in sources}
    others = named.pop(OTHERS, None)
    return lambda source: named.get(source, source if others is None else others)


def counts(mixture: Mapping[str, float], per_step: int) -> dict[str, int]:
    """Return the number of prompts per domain in a step: its share, rounded down, plus one for the largest remainders.

    Equal remainders favor the domain named first. Raises ValueError if a domain would have no prompt.
    """
    exact = {name: share * per_step for name, share in mixture.items()}
    numbers = {name: int(number) for name, number in exact.items()}
    # Rounding makes the remainders of thirds equal; sorted() keeps their order.
    most = sorted(exact, key=lambda name: round(numbers[name] - exact[name], 9))
    for name in most[: per_step - sum(numbers.values())]:
        numbers[name] += 1
    if empty := [name for name, count in numbers.items() if count == 0]:
        raise UserError(
            f"must give every domain a prompt of a step: {empty[0]!r} has {mixture[empty[0]]:g} of {per_step}; raise its "
            "share or data.prompts_per_step"
        )
    return numbers
