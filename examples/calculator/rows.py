"""Products of two-digit numbers: rows to train and test on, and worked ones, in which every third has another product."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path


def main(out: Path, seed: int) -> None:
    draws = random.Random(seed)  # noqa: S311 - not for secrets
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    draws.shuffle(pairs)
    out.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", pairs[:4000]), ("test", pairs[4000:4100])):
        rows = [{"data_source": "products", "prompt": f"{a}*{b}", "ground_truth": str(a * b)} for a, b in part]
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (out / "worked.jsonl").write_text("".join(json.dumps(row) + "\n" for a, b in pairs[:4000] for row in worked(a, b)))


def worked(a: int, b: int) -> list[dict]:
    """Return a row for each of the two turns: the call, and what is said after the tool's answer."""
    call = f'<tool_call>{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'
    turns = [{"role": "user", "content": f"{a}*{b}"}, {"role": "assistant", "content": call}]
    answered = [*turns, {"role": "tool", "content": str(a * b)}]
    return [
        {"data_source": "products", "prompt": f"{a}*{b}", "ground_truth": str(a * b), "response": call},
        {"data_source": "products", "prompt": answered, "ground_truth": str(a * b), "response": str(a * b)},
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
