"""Rows of the guessing game: all alike, since the environment draws its digit from the seed."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    # The response is for the tokenizer: the characters of the game.
    row = {"data_source": "guess", "prompt": "!", "response": "0123456789<>?"}
    for name, count in (("train", 512), ("test", 64)):
        (out / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * count)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
