"""A million prompts: how long a rank takes until it has them, the first time and afterwards, and what memory that takes.

python benchmarks/start_up.py [ROWS]        # no GPU; writes a data set of its own
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path


def write_rows(path: Path, rows: int) -> None:
    """Questions of 20 to 60 words as messages, with a ground truth."""
    draw = random.Random(0)
    words = [f"word{number}" for number in range(2000)]
    with path.open("w") as file:
        for number in range(rows):
            text = " ".join(draw.choices(words, k=draw.randint(20, 60)))
            row = {
                "prompt": [{"role": "user", "content": f"{text} What is {number} + 1?"}],
                "data_source": f"source-{number % 4}",
                "reward_model": {"ground_truth": str(number + 1)},
                "extra_info": {"index": number},
            }
            file.write(json.dumps(row) + "\n")


def start(data: str, tokenizer: str, cache: str) -> None:
    """What a rank does with its data, in a process of its own."""
    from fivefold.data.prompt_cache import open_prompts, store_prompts
    from fivefold.data.prompt_loader import PromptLoader
    from fivefold.data.prompts import Reading

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    path = store_prompts([data], (Path(tokenizer), False), Reading(512), Path(cache), lambda line: print(line, flush=True))
    found = open_prompts(path)
    sources = {source for _, source, _ in found.ground_truths()}
    ready = time.perf_counter() - begin
    loader = PromptLoader(found.prompts, 256, 0, True)
    begin = time.perf_counter()
    taken = loader.take(0, 256)
    first = time.perf_counter() - begin
    begin = time.perf_counter()
    tokens = sum(len(prompt.token_ids) for prompt in loader.take(256, 256)) / 256
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"{len(found.prompts):,} prompts of {len(sources)} sources, about {tokens:.0f} tokens each: ready after {ready:.1f} "
        f"s; 256 of them in {first * 1000:.0f} ms, the next 256 in {(time.perf_counter() - begin) * 1000:.0f} ms; "
        f"{before / 1024:.0f} MiB before, {after / 1024:.0f} MiB at most ({len(taken)} prompts taken)",
        flush=True,
    )


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    print(f"{rows:,} rows, {len(os.sched_getaffinity(0))} cores", flush=True)
    from fivefold.data.tokenizer import train_tokenizer

    with tempfile.TemporaryDirectory() as directory:
        data, tokenizer, cache = (str(Path(directory) / name) for name in ("data.jsonl", "tokenizer", "cache"))
        write_rows(Path(data), rows)
        with Path(data).open() as file:
            train_tokenizer("bpe", list(islice(file, 2000)), Path(tokenizer), 4096)
        print(f"data {Path(data).stat().st_size / 2**20:.0f} MiB", flush=True)
        for name in ("first", "second"):
            print(f"{name} start:", flush=True)
            subprocess.run([sys.executable, __file__, "--start", data, tokenizer, cache], check=True)
        (path,) = Path(cache).glob("*.arrow")
        print(f"cache {path.stat().st_size / 2**20:.0f} MiB", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--start"]:
        start(*sys.argv[2:])
    else:
        main()
