"""Write a translation as a commented run.yaml, with a table of how each key of the source was handled."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import yaml

from fivefold.config.dialect import REFUSED, Kind, Line, Outcome, Translation
from fivefold.config.loader import ConfigError
from fivefold.config.run_config import RunConfig
from fivefold_dialects.translator import nested, our_defaults

_WIDTH = 60
TITLES: dict[Kind, str]
TITLES = {"translated": "translated", "fixed": "fixed here", "unsupported": "not supported", "unknown": "unknown"}


def write(translation: Translation, system: str, *, strict: bool = True) -> str:
    """Return the values that differ from our defaults as YAML, each with its source keys; a table at the end counts these.
    With `strict`, the file of a refused run begins with the key `refused`; a run with this key does not start."""
    release = f", with the defaults of its release {translation.release}" if translation.release else ""
    parts = [f"# Translated from {system}{release}. Each value is followed by the key that it comes from.",
             "# A key that is not in this file keeps our default, which is the value that the run needs.", ""]  # fmt: skip
    if strict and translation.refusals:
        parts += ["# The run below does not have these settings. Delete this key to accept that.", f"{REFUSED}:"]
        parts += [*(f"  - {_flow(refusal)}" for refusal in translation.refusals), ""]
    path: tuple[str, ...] = ()
    for line in _needed(translation.lines):
        *sections, last = line.key.split(".")
        common = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(path, sections, strict=False))))
        parts += [f"{'  ' * depth}{sections[depth]}:" for depth in range(common, len(sections))]
        path = tuple(sections)
        setting = f"{'  ' * len(sections)}{last}: {_flow(line.value)}"
        parts.append(f"{setting:<{_WIDTH}}  {_comment(_sources(line, system))}")
    notes = [_comment(f"Note: {sentence}.") for sentence in translation.notes]
    return "\n".join([*parts, "", *notes, *_table(translation.outcomes, system), ""])


def summary(translation: Translation) -> str:
    """Return one line with the counts of keys, and with the release of the defaults if it is not the current one."""
    counts = Counter(outcome.kind for outcome in translation.outcomes)
    release = [f"defaults of release {translation.release}"] if translation.release else []
    return ", ".join([*(f"{counts[kind]} {title}" for kind, title in TITLES.items()), *release])


def notes(translation: Translation) -> list[str]:
    """Return sentences about the translated run: its notes, and unsupported settings that change no number."""
    return [*translation.notes, *(f"{outcome.key}={outcome.shown}: {outcome.reason}" for outcome in translation.outcomes
            if outcome.kind == "unsupported" and not outcome.changes_result)]  # fmt: skip


def _needed(lines: Sequence[Line]) -> list[Line]:
    """Return the lines that the run needs: no defaults, always the method's name, and no choices that the method implies."""
    needed = [line for line in lines if not _is_default(line)]
    chosen = _choices(needed)
    for line in list(needed):
        section, _, name = line.key.partition(".")
        fewer = [other for other in needed if other is not line]
        if section == "algorithm" and hasattr(chosen, name.partition(".")[0]) and _choices(fewer) == chosen:
            needed = fewer
    return needed


def _choices(lines: Sequence[Line]) -> object:
    """Return the resolved method of the run; None if the lines are not a valid run."""
    try:
        return RunConfig.from_tree(nested(lines)).algorithm.resolved
    except ConfigError:
        return None


def _is_default(line: Line) -> bool:
    """Return whether the line has our key's default; always False for the method's name."""
    if line.key == "algorithm.name":
        return False
    default = our_defaults().get(line.key, dataclasses.MISSING)
    value = tuple(line.value) if isinstance(line.value, list) else line.value
    default = tuple(default) if isinstance(default, list) else default
    return type(value) is type(default) and bool(value == default)


def _sources(line: Line, system: str) -> str:
    if not line.sources:
        return f"{system}'s default"
    more = f" and {len(line.sources) - 3} more" if len(line.sources) > 3 else ""
    return ", ".join(line.sources[:3]) + more


def _flow(value: Any) -> str:
    """Return a value in YAML's flow form, in one line; what a terminal does not show is escaped, as it is when printed."""
    texts = (yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=is_raw) for is_raw in (True, False))
    shown, escaped = (text.removesuffix("\n...\n").strip(" \n") for text in texts)
    return shown if shown.isprintable() else escaped


def _table(outcomes: list[Outcome], system: str) -> list[str]:
    counts = Counter(outcome.kind for outcome in outcomes)
    lines = [f"# {sum(counts.values())} keys of {system}:"]
    for kind, title in TITLES.items():
        if not counts[kind]:
            continue
        lines.append(f"# {counts[kind]:4d} {title}")
        if kind != "translated":
            of_kind = [outcome for outcome in outcomes if outcome.kind == kind]
            lines += [_comment(f"       {outcome.key} = {outcome.shown}: {_marked(outcome)}") for outcome in of_kind]
    return lines


def _comment(text: str) -> str:
    """Return a comment of one line; line breaks in keys and values of the source are escaped."""
    return "# " + "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _marked(outcome: Outcome) -> str:
    differs = outcome.kind == "unsupported" and outcome.changes_result
    return f"{outcome.reason} (the numbers would differ)" if differs else outcome.reason
