"""GSM8K for a small model: problems, their solutions to imitate without the calculator's notes, and the easier problems.

    python examples/smollm2/gsm8k.py OUT [TRAIN.jsonl TEST.jsonl]         without files from the hub

Writes OUT/train.jsonl, OUT/test.jsonl, and OUT/easy.jsonl: training problems whose solution has at most three calculations.
A model of 135M parameters seldom solves longer ones, and a group of wrong responses teaches nothing.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fivefold.data.prepare import rows_of
from fivefold.errors import sentence_of

NOTE = re.compile(r"<<.*?>>")
"""A calculator's note in a solution: `48/2 = <<48/2=24>>24`."""
MOST_CALCULATIONS = 3


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with a solution without notes."""
    return row | {"response": NOTE.sub("", row["response"])}


def is_easy(row: dict[str, Any]) -> bool:
    return len(NOTE.findall(row["response"])) <= MOST_CALCULATIONS


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    lines = [json.dumps(plain(row)) + "\n" for row in rows]
    path.write_text("".join(lines))
    print(f"{path}: {len(lines)} rows")


def main(out: Path, sources: list[Path]) -> int:
    try:
        splits = rows_of("gsm8k", sources)
    except Exception as error:
        if (sentence := sentence_of(error)) is None:
            raise
        print(f"gsm8k: {sentence}", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    write(out / "train.jsonl", splits["train"])
    write(out / "easy.jsonl", filter(is_easy, splits["train"]))
    write(out / "test.jsonl", splits["test"])
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]))
