"""Proposals of `fivefold init`: models, data and engines on this machine, and the use of a file's rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from fivefold.algo.methods import LearnsFrom
from fivefold.config.schema import DataConfig
from fivefold.config.scoring import RewardConfig
from fivefold.data.data_sets import HubDataSet, cache_of
from fivefold.data.rows import OTHER_NAMES, Columns, Row, check_responses, count_rows, parse_row, read_rows, source_of
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
REWARDS = ("gsm8k", "code", "countdown", "math")
"""Built-in rewards in the order in which they are tried on ground truths: the most specific first."""
_VALIDATION = ("test", "val", "validation")
_WAYS: list[tuple[LearnsFrom, bool]] = [("pairs", False), ("rollouts", True), ("responses", False), ("rollouts", False)]
"""What a run may learn from, and whether rows need a ground truth for it, the likeliest first."""
_NEEDS = {"pairs": "a pair to compare", "rollouts": "a prompt", "responses": "a prompt and a response"}


def propose_model() -> str:
    """Return a model directory below this one, else a model in the hub's cache, else a small hub model."""
    directories = {
        str(path.parent): path.parent
        for pattern in ("*", "models/*")
        for path in sorted(Path().glob(f"{pattern}/config.json"))
    }
    return next((name for name, path in (directories | cached_models()).items() if _is_known(path)), HUB_MODEL)


def _is_known(directory: Path) -> bool:
    """Return whether its config.json names a model family that can be trained."""
    try:
        return read_json_object(directory / "config.json").get("model_type") in FAMILIES
    except UserError:
        return False


def propose_data() -> str:
    """Return a file of training rows below `data`, or the one that `fivefold data gsm8k` would write."""
    files = sorted(path for pattern in ("train*.parquet", "train*.jsonl") for path in Path("data").rglob(pattern))
    return str(files[0]) if files else DATA


def validation_of(train: str) -> str | None:
    """Return the evaluation file next to the training rows, by its name, or the split of a data set of the hub."""
    if (hub := HubDataSet.parse(train)) is not None:
        splits = hub.splits(cache_of(DataConfig()))
        split = next((word for word in _VALIDATION if word in splits and word != hub.split), None)
        return None if split is None else replace(hub, split=split).name
    path = Path(train)
    if "train" in path.name:
        for word in _VALIDATION:
            if (neighbour := path.with_name(path.name.replace("train", word))).exists():
                return str(neighbour)
    return None


def propose_engine() -> str:
    """Return vLLM if it is installed, otherwise the transformers engine."""
    return "transformers" if installed_version() is None else "vllm"


@dataclass(frozen=True)
class Rows:
    """One possible use of the first rows of a data set."""

    learns_from: LearnsFrom
    columns: Columns
    count: int
    reward: str | None
    """Built-in reward that suits every ground truth; None if none does."""
    is_by_source: bool
    """True if the rows' data_source chooses that reward by itself."""
    has_truth: bool = True
    """Whether the rows have a ground truth."""


def look_at(
    train: str, file: Path, learns_from: LearnsFrom | None, prompt: str | None, truth: str | None
) -> dict[LearnsFrom, Rows]:
    """Return the uses of the rows, from their columns or the named ones, the likeliest first; raise ValueError without any.

    `file` is the local file of `train`. Rows with a pair have no other use, unless `learns_from` names it.
    """
    rows = list(islice(read_rows(file), ROWS))
    if not rows:
        raise UserError(f"{train} has no rows")
    source, uses = source_of(file), dict[LearnsFrom, Rows]()
    for way, needs_truth in _WAYS:
        if way in uses or "pairs" in uses or learns_from not in (None, way):
            continue
        for columns in _candidates(way, prompt, truth, needs_truth):
            if (read := _read(rows, columns, way, source, needs_truth)) is not None:
                uses[way] = _uses(way, columns, read, count_rows(file, 10**6), needs_truth)
                break
    if uses:
        return uses
    wanted = " or ".join(text for way, text in _NEEDS.items() if learns_from in (None, way))
    names = ", ".join(map(str, rows[0]))
    raise UserError(
        f"the columns of {train} must hold {wanted}: it has {shown(names, 200)}; name"
        " them with --prompt-key and --answer-key"
    )


def _candidates(way: LearnsFrom, prompt: str | None, truth: str | None, needs_truth: bool) -> Iterator[Columns]:
    """Yield possible columns, the usual ones first."""
    usual = Columns()
    if way == "responses" and prompt is None:
        # A whole conversation needs no other column.
        yield usual
    for one in OTHER_NAMES["prompt_key"] if prompt is None else (prompt,):
        named = replace(usual, prompt=one)
        if way == "pairs" or (way == "rollouts" and not needs_truth):
            yield named
        else:
            known = OTHER_NAMES["ground_truth_key" if way == "rollouts" else "response_key"]
            for other in known if truth is None else (truth,):
                yield replace(named, ground_truth=other) if way == "rollouts" else replace(named, response=other)


def _read(rows: list[dict[str, Any]], columns: Columns, way: LearnsFrom, source: str, needs_truth: bool) -> list[Row] | None:
    """Return the rows read with these columns; None if a row lacks something."""
    parsed_rows = []
    for row in rows:
        try:
            parsed = parse_row(row, columns, way, source)
            check_responses(parsed, columns, way, [])
        except UserError:
            # For sft or dpo data, the ground truth is read only if an unusual column is named.
            return None
        lacks_truth = needs_truth and not parsed.ground_truth.strip()
        if way == "rollouts" and (lacks_truth or parsed.messages[-1]["role"] == "assistant"):
            return None
        parsed_rows.append(parsed)
    return parsed_rows


def _uses(way: LearnsFrom, columns: Columns, rows: list[Row], count: int, has_truth: bool) -> Rows:
    truths, sources = {row.ground_truth for row in rows}, {row.source for row in rows}
    try:
        chosen = {next(iter(choose_rewards(RewardConfig(), source).weights)) for source in sources}
    except UserError:
        chosen = set()
    fits = [name for name in REWARDS if has_truth and not any(ground_truth_fault(name, truth) for truth in truths)]
    is_by_source = bool(chosen) and chosen <= set(fits)
    reward = " ".join(sorted(chosen)) if is_by_source else next(iter(fits), None)
    return Rows(way, columns, count, reward if way == "rollouts" else None, is_by_source, has_truth)
