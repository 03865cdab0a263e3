"""Rows of the frozen lake: all alike, since the environment draws the first tile from the seed."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    # The response is for the tokenizer: the characters of the walk.
    row = {"data_source": "lake", "prompt": "0", "response": "0123<v>^?"}
    for name, count in (("train", 512), ("test", 32)):
        (out / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * count)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
