"""METHODS -> the rows of docs/methods.md, which `make docs` writes."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

import yaml

from fivefold.config import methods

BEGIN, END = "<!-- rows: begin (written by `make docs`) -->\n", "<!-- rows: end -->\n"


_USUAL_NUMBERS = methods.SURROGATES[str(methods.USUAL.surrogate)].numbers({})


def write_rows() -> str:
    """Return each method with its source and the choices in its row; what a row leaves out is the usual choice."""
    return "\n".join(f"### {name}\n{_text(name)}\n```yaml\n{_block(name)}```\n" for name in methods.METHODS)


def update(page: str) -> str:
    """Return the page with the current rows."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + write_rows() + END + rest.partition(END)[2]


def _text(name: str) -> str:
    method = methods.METHODS[name]
    columns = ", ".join(f"`data.{key}`" for key in method.columns)
    learns = f" Learns from {method.learns_from} in the data ({columns})." if method.offline else ""
    return textwrap.fill(f"{method.about}{learns}", 118, break_long_words=False, break_on_hyphens=False)


def _block(method: str) -> str:
    usual, chosen = methods.USUAL, methods.resolve(method)
    choices: dict[str, Any] = {"advantage": chosen.advantage}
    for item in dataclasses.fields(methods.Choices):
        name, value = item.name, getattr(chosen, item.name)
        if name in ("kl", "rollout_correction", "expert", "process_reward", "penalty_aggregate") or value is None:
            continue
        # For a surrogate other than the usual one, all numbers are shown.
        left_out = _USUAL_NUMBERS.get(name) if chosen.surrogate == usual.surrogate else None
        if value != (left_out if name in methods.PARAMETERS else getattr(usual, name)):
            choices[name] = value
    if chosen.kl.coef:
        choices["kl"] = {key: getattr(chosen.kl, key) for key in ("estimator", "coef", "place")}
    own = dataclasses.asdict(methods.METHODS[method].rollout_correction)
    if correction := {key: value for key, value in own.items() if value is not None}:
        choices["rollout_correction"] = correction
    expert = dataclasses.asdict(methods.METHODS[method].expert)
    if imitated := {key: value for key, value in expert.items() if value is not None}:
        choices["expert"] = imitated
    process = dataclasses.asdict(methods.METHODS[method].process_reward)
    if rewarded := {key: value for key, value in process.items() if value is not None}:
        choices["process_reward"] = rewarded
    text: str = yaml.safe_dump(choices, sort_keys=False, default_flow_style=True, width=120)
    return text
