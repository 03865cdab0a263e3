"""METHODS -> the rows of docs/methods.md, which `make docs` writes."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

import yaml

from fivefold.algo import methods
from fivefold.algo.choices import PARTS
from fivefold.algo.surrogates import PARAMETERS, SURROGATES

BEGIN, END = "<!-- rows: begin (written by `make docs`) -->\n", "<!-- rows: end -->\n"


_USUAL_NUMBERS = SURROGATES[methods.USUAL.surrogate].parameters()
SECTIONS = tuple(part.section for part in PARTS if part.section)


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
    for item in dataclasses.fields(usual):
        name, value = item.name, getattr(chosen, item.name)
        if name in SECTIONS or name == "penalty_aggregate" or value is None:
            continue
        # For a surrogate other than the usual one, all numbers are shown.
        left_out = _USUAL_NUMBERS.get(name) if chosen.surrogate == usual.surrogate else None
        if value != (left_out if name in PARAMETERS else getattr(usual, name)):
            choices[name] = value
    if chosen.kl.coef:
        choices["kl"] = {key: getattr(chosen.kl, key) for key in ("estimator", "coef", "place")}
    for section in SECTIONS:
        if section == "kl":
            continue
        parameters = dataclasses.asdict(getattr(methods.METHODS[method], section))
        if chosen_there := {key: value for key, value in parameters.items() if value is not None}:
            choices[section] = chosen_there
    text: str = yaml.safe_dump(choices, sort_keys=False, default_flow_style=True, width=120)
    return text
