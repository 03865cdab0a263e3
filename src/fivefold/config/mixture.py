"""Domains of a data set: which data_sources they have, and how many prompts of each a step takes. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

OTHERS = "*"
"""In a domain's data_sources: every one that no domain names."""


def domains_of(domains: Mapping[str, Sequence[str]]) -> Callable[[str], str]:
    """data_source -> its domain; one that no domain names is a domain of its own, unless a domain takes all others."""
    named = {source: domain for domain, sources in domains.items() for source in sources}
    others = named.pop(OTHERS, None)
    return lambda source: named.get(source, source if others is None else others)


def counts(mixture: Mapping[str, float], per_step: int) -> dict[str, int]:
    """Prompts of each domain in a step: its share of them, rounded down, and those left over to the largest remainders.

    Equal remainders go to the domain that is named first. Raises ValueError where a domain would have none.
    """
    exact = {name: share * per_step for name, share in mixture.items()}
    found = {name: int(number) for name, number in exact.items()}
    # Thirds of a number are equals; sorted() keeps their order.
    most = sorted(exact, key=lambda name: round(found[name] - exact[name], 9))
    for name in most[: per_step - sum(found.values())]:
        found[name] += 1
    if empty := [name for name, count in found.items() if count == 0]:
        raise ValueError(
            f"must give every domain a prompt of a step: {empty[0]!r} has {mixture[empty[0]]:g} of {per_step}; raise its "
            "share or data.prompts_per_step"
        )
    return found
