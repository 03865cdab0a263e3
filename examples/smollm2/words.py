"""Arithmetic in words: problems, their answers to imitate, and the reward. A seed gives the same files everywhere.

    python examples/smollm2/words.py OUT [SEED]         writes OUT/train.jsonl and OUT/test.jsonl
    python examples/smollm2/words.py OUT SEED 10        with numbers below 10 only, for a CPU

"What is forty-one plus twenty-seven?" must be answered with "68" alone.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

SYSTEM = "Answer with one number."
"""Takes the place of the longer system message that the chat template begins with."""
TRAIN, TEST = 6000, 500
"""Rows at most; a third of few problems is for the test."""
UNITS = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def words(number: int) -> str:
    """Write a number from 0 to 99 in English."""
    if number < 20:
        return UNITS[number]
    tens, unit = divmod(number, 10)
    return TENS[tens - 2] + (f"-{UNITS[unit]}" if unit else "")


def right(response: str, ground_truth: str) -> float:
    """Return 1 if the response is the ground truth and nothing else."""
    return float(response.strip() == ground_truth)


def problems(numbers: range = range(10, 100)) -> list[tuple[str, int]]:
    """Every question about two of the numbers with its answer; no answer is below 0."""
    pairs = [(a, b) for a in numbers for b in numbers]
    return [(f"What is {words(a)} plus {words(b)}?", a + b) for a, b in pairs] + [
        (f"What is {words(a)} minus {words(b)}?", a - b) for a, b in pairs if a >= b
    ]


def row(question: str, answer: int) -> dict[str, object]:
    return {
        "data_source": "words",
        "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
        "reward_model": {"style": "rule", "ground_truth": str(answer)},
        "response": str(answer),
    }


def main(out: Path, seed: int = 0, below: int | None = None) -> None:
    every = problems() if below is None else problems(range(below))
    random.Random(seed).shuffle(every)  # noqa: S311 - not for secrets
    out.mkdir(parents=True, exist_ok=True)
    test = min(TEST, len(every) // 3)
    train = min(TRAIN, len(every) - test)
    for name, part in (("train", every[:train]), ("test", every[train : train + test])):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row(*problem)) + "\n" for problem in part))
        print(f"{out / name}.jsonl: {len(part)} rows")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
