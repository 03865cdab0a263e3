"""Sums of three-digit numbers with digits below 5, so that nothing is carried: worked ones to learn from, and a test."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

TRAIN, TEST = 3000, 200


def main(out: Path, seed: int) -> None:
    numbers = [n for n in range(100, 445) if max(str(n)) < "5"]
    problems = [(a, b) for a in numbers for b in numbers]
    random.Random(seed).shuffle(problems)  # noqa: S311 - not for secrets
    out.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", problems[:TRAIN]), ("test", problems[TRAIN : TRAIN + TEST])):
        rows = [
            {
                "data_source": "arithmetic",
                "prompt": f"{a}+{b}=",
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                "response": f"#### {a + b}",
            }
            for a, b in part
        ]
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{out / name}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
