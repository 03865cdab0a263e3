"""A translation -> the commented run.yaml, and the table of what became of the source's keys."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import yaml

from fivefold.config.dialects import Kind, Line, Outcome, Translation

_WIDTH = 60
_SECRET = re.compile(r"(api|access|secret|private)_?key$|token$|password$|secret$", re.IGNORECASE)
"""How names of keys end whose values are secrets."""
TITLES: dict[Kind, str] = {
    "translated": "translated",
    "fixed": "fixed here",
    "unsupported": "not supported",
    "unknown": "unknown",
}


def write(translation: Translation, system: str) -> str:
    """The configuration as YAML; each line names the keys that it comes from, a table at the end counts them."""
    release = f", with the defaults of its release {translation.release}" if translation.release else ""
    parts = [f"# Translated from {system}{release}. Behind each value stands the key that it comes from.", ""]
    path: tuple[str, ...] = ()
    for line in translation.lines:
        *sections, last = line.key.split(".")
        common = next(
            (i for i, (a, b) in enumerate(zip(path, sections, strict=False)) if a != b), min(len(path), len(sections))
        )
        parts += [f"{'  ' * depth}{sections[depth]}:" for depth in range(common, len(sections))]
        path = tuple(sections)
        setting = f"{'  ' * len(sections)}{last}: {_flow(line.value)}"
        parts.append(f"{setting:<{_WIDTH}}  # {_sources(line, system)}")
    said = [f"# Note: {sentence}." for sentence in translation.notes]
    return "\n".join([*parts, "", *said, *_table(translation.outcomes, system), ""])


def summary(translation: Translation) -> str:
    """One line with the counts, and the release whose defaults were taken where it is not today's."""
    counts = Counter(each.kind for each in translation.outcomes)
    release = [f"defaults of release {translation.release}"] if translation.release else []
    return ", ".join([*(f"{counts[kind]} {title}" for kind, title in TITLES.items()), *release])


def notes(translation: Translation) -> list[str]:
    """What its users should know of the run, and what is not supported and changes no number, one sentence each."""
    return [*translation.notes, *(f"{each.key}={each.value}: {each.reason}" for each in translation.outcomes
            if each.kind == "unsupported" and not each.changes_result)]  # fmt: skip


def _sources(line: Line, system: str) -> str:
    if not line.sources:
        return f"{system}'s default"
    more = f" and {len(line.sources) - 3} more" if len(line.sources) > 3 else ""
    return ", ".join(line.sources[:3]) + more


def _flow(value: Any) -> str:
    """A value in YAML's short form, in one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True)
    return text.removesuffix("\n...\n").strip()


def _table(outcomes: list[Outcome], system: str) -> list[str]:
    counts = Counter(each.kind for each in outcomes)
    lines = [f"# {sum(counts.values())} keys of {system}:"]
    for kind, title in TITLES.items():
        if not counts[kind]:
            continue
        lines.append(f"# {counts[kind]:4d} {title}")
        if kind != "translated":
            lines += [f"#        {each.key} = {_shown(each)}: {_marked(each)}" for each in outcomes if each.kind == kind]
    return lines


def _shown(each: Outcome) -> str:
    """A value as it was written; what is written here lies in the run's directory, where a secret has no place."""
    if _SECRET.search(each.key.rpartition(".")[2]) and isinstance(each.value, str):
        return "***"
    return each.value if isinstance(each.value, str) else _flow(each.value)


def _marked(each: Outcome) -> str:
    return (
        f"{each.reason} (the numbers would be others)" if each.kind == "unsupported" and each.changes_result else each.reason
    )
