"""Proposals of `fivefold init`: models, data and engines on this machine, and the use of a file's rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from fivefold.algo.methods import LearnsFrom
from fivefold.config.scoring import RewardConfig
from fivefold.data.rows import Columns, Row, check_responses, count_rows, parse_row, read_rows
from fivefold.engines.vllm.arguments import installed_version
from fivefold.errors import UserError, shown
from fivefold.files import read_json_object
from fivefold.hub import cached_models
from fivefold.models.families import FAMILIES
from fivefold.reward.choose import choose_rewards
from fivefold.reward.rules import ground_truth_fault

ROWS = 200
"""Number of rows of a file that are checked."""
HUB_MODEL, DATA = "Qwen/Qwen3-0.6B", "data/gsm8k/train.parquet"
"""Model and data file that are proposed if this machine has none."""
PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input", "messages")
TRUTHS = ("reward_model.ground_truth", "ground_truth", "answer", "final_answer", "solution", "target", "label", "output")
RESPONSES = ("response", "completion", "answer", "solution", "output", "target")
REWARDS = ("gsm8k", "code", "countdown", "math")
"""Built-in rewards in the order in which they are tried on ground truths: the most specific first."""


def propose_model() -> str:
    """Return a model directory below this one, else a model in the hub's cache, else a small hub model."""
    here = {
        str(path.parent): path.parent
        for pattern in ("*", "models/*")
        for path in sorted(Path().glob(f"{pattern}/config.json"))
    }
    return next((name for name, path in (here | cached_models()).items() if _is_known(path)), HUB_MODEL)


def _is_known(directory: Path) -> bool:
    """Return whether its config.json names a model family that can be trained."""
    try:
        return read_json_object(directory / "config.json").get("model_type") in FAMILIES
    except UserError:
        return False


def propose_data() -> str:
    """Return a file of training rows below `data`, or the one that `fivefold data gsm8k` would write."""
    found = sorted(path for pattern in ("train*.parquet", "train*.jsonl") for path in Path("data").rglob(pattern))
    return str(found[0]) if found else DATA


def validation_of(train: str) -> str | None:
    """Return the evaluation file next to the training rows, by its name."""
    path = Path(train)
    if "train" in path.name:
        for word in ("test", "val", "validation"):
            if (neighbour := path.with_name(path.name.replace("train", word))).is_file():
                return str(neighbour)
    return None


def propose_engine() -> str:
    """Return vLLM if it is installed, otherwise the transformers engine."""
    return "transformers" if installed_version() is None else "vllm"


@dataclass(frozen=True)
class Rows:
    """Possible uses of the first rows of a file."""

    learns_from: LearnsFrom
    columns: Columns
    count: int
    reward: str | None
    """Built-in reward that suits every ground truth; None if none does."""
    is_by_source: bool
    """True if the rows' data_source chooses that reward by itself."""


def look_at(train: str, learns_from: LearnsFrom | None, prompt: str | None, truth: str | None) -> Rows:
    """Return the use of the rows, from their columns or the named ones; raise ValueError if they fit no method."""
    rows = list(islice(read_rows(Path(train)), ROWS))
    if not rows:
        raise UserError(f"{train} has no rows")
    ways: tuple[LearnsFrom, ...] = ("pairs", "rollouts", "responses") if learns_from is None else (learns_from,)
    for way in ways:
        for columns in _candidates(way, prompt, truth):
            if (found := _read(rows, columns, way, Path(train).stem)) is not None:
                return _uses(way, columns, found, count_rows(Path(train), 10**6))
    wanted = " or ".join({"pairs": "a pair to compare", "rollouts": "a prompt and an answer", "responses": "a prompt and a "
                          "response"}[way] for way in ways)  # fmt: skip
    names = ", ".join(map(str, rows[0]))
    raise UserError(
        f"the columns of {train} must hold {wanted}: it has {shown(names, 200)}; name"
        " them with --prompt-key and --answer-key"
    )


def _candidates(way: LearnsFrom, prompt: str | None, truth: str | None) -> Iterator[Columns]:
    """Yield possible columns, the usual ones first."""
    usual = Columns()
    if way == "responses" and prompt is None:
        # A whole conversation needs no other column.
        yield usual
    for one in PROMPTS if prompt is None else (prompt,):
        named = replace(usual, prompt=one)
        if way == "pairs":
            yield named
        else:
            known = TRUTHS if way == "rollouts" else RESPONSES
            for other in known if truth is None else (truth,):
                yield replace(named, ground_truth=other) if way == "rollouts" else replace(named, response=other)


def _read(rows: list[dict[str, Any]], columns: Columns, way: LearnsFrom, source: str) -> list[Row] | None:
    """Return the rows read with these columns; None if a row lacks something."""
    found = []
    for row in rows:
        try:
            parsed = parse_row(row, columns, way, source)
            check_responses(parsed, columns, way, [])
        except UserError:
            # For sft or dpo data, the ground truth is read only if an unusual column is named.
            return None
        if way == "rollouts" and not parsed.ground_truth.strip():
            return None
        found.append(parsed)
    return found


def _uses(way: LearnsFrom, columns: Columns, rows: list[Row], count: int) -> Rows:
    truths, sources = {row.ground_truth for row in rows}, {row.source for row in rows}
    try:
        chosen = {next(iter(choose_rewards(RewardConfig(), source).weights)) for source in sources}
    except UserError:
        chosen = set()
    fits = [name for name in REWARDS if not any(ground_truth_fault(name, truth) for truth in truths)]
    is_by_source = bool(chosen) and chosen <= set(fits)
    reward = " ".join(sorted(chosen)) if is_by_source else next(iter(fits), None)
    return Rows(way, columns, count, reward if way == "rollouts" else None, is_by_source)
