"""Data sets in the schema of verl, siiRL and SkyRL: source files -> train and test parquet.

Columns: data_source, prompt (messages), ability, reward_model {style, ground_truth}, extra_info, and `response`: the worked
solution if the source has one (for sft).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fivefold.data.rows import read_rows
from fivefold.errors import UserError, shown
from fivefold.files import read_json, read_json_lines, read_text
from fivefold.hub import dataset_file

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
MATH_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
INSTRUCTIONS = {
    "verl": {"gsm8k": f" {GSM8K_INSTRUCTION}", "math": f" {MATH_INSTRUCTION}", "deepscaler": f" {MATH_INSTRUCTION}"},
    "areal": {"gsm8k": "\nPlease put your final answer within \\boxed{}."},
}
"""Name of the form -> text after each question, by data set (AReaL's: areal/dataset/gsm8k.py)."""
HUB = {
    "gsm8k": ("openai/gsm8k", {"train": "main/train-00000-of-00001.parquet", "test": "main/test-00000-of-00001.parquet"}),
    "deepscaler": ("agentica-org/DeepScaleR-Preview-Dataset", {"train": "deepscaler.json"}),
    "math": ("HuggingFaceH4/MATH-500", {"test": "test.jsonl"}),
}
TEST_SHARE = 0.05
_MOST_BELOW, _NAMED = 2000, 10
Log = Callable[[str], None]


def prepare(
    name: str,
    out: Path,
    source: list[Path],
    limit: int | None = None,
    seed: int = 0,
    below: int = 100,
    form: str = "verl",
    log: Log = print,
) -> dict[str, int]:
    """Write `out`/train.parquet and `out`/test.parquet; return the number of rows in each."""
    splits = rows_of(name, source, limit, seed, below, form, log)
    out.mkdir(parents=True, exist_ok=True)
    written = {}
    for split, rows in splits.items():
        if rows:
            _write(rows, out / f"{split}.parquet")
            written[split] = len(rows)
    return written


def rows_of(
    name: str,
    source: list[Path],
    limit: int | None = None,
    seed: int = 0,
    below: int = 100,
    form: str = "verl",
    log: Log = print,
) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the splits "train" and "test".

    `source` are local files. Files with "test" in their name make the test split; without one, the last 5 % of the rows do.
    Without `source` the files come from the hub; `arithmetic` needs none. `form` chooses the text after each question.
    Rows whose answer is null are left out and reported.
    """
    if form != "verl" and name not in INSTRUCTIONS[form]:
        raise UserError(f"--form {form} is a form of {', '.join(INSTRUCTIONS[form])}: got {name}")
    if limit is not None and limit < 1:
        raise UserError(f"--limit must be at least 1: got {limit}")
    if name == "arithmetic":
        splits = arithmetic(limit or below * below * 3 // 4, seed, below)
    else:
        splits = {"train": [], "test": []}
        for split, path in _files(name, source):
            unanswered = []
            for place, raw in enumerate(_raw_rows(path)):
                if raw.get("answer", ...) is None:
                    unanswered.append(place)
                    continue
                try:
                    splits[split].append(_row(name, INSTRUCTIONS[form][name], raw, split, len(splits[split])))
                except ValueError as error:
                    raise UserError(f"{path}, row {place}: {error}") from error
            if unanswered:
                places = ", ".join(map(str, unanswered[:_NAMED])) + (", ..." if len(unanswered) > _NAMED else "")
                log(f"{path}: rows whose answer is null are left out, {len(unanswered)} in all: {places}")
        if not splits["train"] and not splits["test"]:
            raise UserError(f"no rows in {', '.join(map(str, source))}")
        if not splits["test"]:
            held = max(1, int(len(splits["train"]) * TEST_SHARE))
            splits["test"], splits["train"] = splits["train"][-held:], splits["train"][:-held]
        if limit:
            splits = {split: rows[:limit] for split, rows in splits.items()}
    return splits


def arithmetic(count: int, seed: int, below: int) -> dict[str, list[dict[str, Any]]]:
    """Create sums of two numbers, each problem once; the test split has none of the training problems."""
    if not 2 <= below <= _MOST_BELOW:
        raise UserError(f"--below must be in [2, {_MOST_BELOW}]: got {below}")
    problems = [(a, b) for a in range(below) for b in range(below)]
    random.Random(seed).shuffle(problems)  # noqa: S311 - not for secrets
    held = max(min(64, len(problems) // 4), len(problems) // 16)
    if not 0 < count <= len(problems) - held:
        raise UserError(
            f"sums of two numbers below {below} have {len(problems)} problems, {held} of them for the test: "
            f"--limit must be at most {len(problems) - held}, got {count}"
        )

    def row(a: int, b: int, split: str, index: int) -> dict[str, Any]:
        return {
            "data_source": "arithmetic",
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"split": split, "index": index},
            "response": f"#### {a + b}",
        }

    return {
        "train": [row(a, b, "train", i) for i, (a, b) in enumerate(problems[:count])],
        "test": [row(a, b, "test", i) for i, (a, b) in enumerate(problems[-held:])],
    }


def _files(name: str, source: list[Path]) -> Iterator[tuple[str, Path]]:
    if source:
        for path in source:
            if not path.is_file():
                raise UserError(f"no source file at {path}")
            yield ("test" if "test" in path.stem else "train"), path
        return
    repository, files = HUB[name]
    for split, file in files.items():
        yield split, dataset_file(repository, file)


def _raw_rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        yield from read_rows(path)
    elif read_text(path).lstrip().startswith("["):
        for row in read_json(path):
            if not isinstance(row, dict):
                raise UserError(f"{path} must hold objects: got {shown(row)}")
            yield row
    else:
        yield from (row for _, row in read_json_lines(path))


def _row(name: str, instruction: str, raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Convert one source row to our schema."""
    if name == "gsm8k":
        question, solution = _text(raw, "question"), _text(raw, "answer")
        truth = solution.rsplit("####", 1)[-1].strip().replace(",", "")
    else:
        question, solution = _text(raw, "problem"), _text(raw, "solution") if raw.get("solution") else ""
        truth = _text(raw, "answer")
    return {
        "data_source": name,
        "prompt": [{"role": "user", "content": question + instruction}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index, "question": question},
        "response": solution,
    }


def _text(raw: dict[str, Any], column: str) -> str:
    text = raw.get(column)
    if not isinstance(text, (str, int, float)):
        raise UserError(f"column {column!r} must be a text: got {shown(text)}; it has {', '.join(raw)}")
    return str(text)


def _write(rows: list[dict[str, Any]], path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    parquet.write_table(arrow.Table.from_pylist(rows), path)
