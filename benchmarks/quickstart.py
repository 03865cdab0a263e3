"""Runs the commands of the README's quickstart word for word, with another model in place of Qwen3-0.6B, and prints them.

    python benchmarks/quickstart.py OUT --model DIRECTORY --source train.jsonl test.jsonl      # on one GPU
    python benchmarks/quickstart.py OUT --dry-run                                              # on a CPU, tiny

The commands are read from the README and run in OUT, where the example's configuration names the model's directory:
`examples/smollm2/get_model.py` writes SmolLM2-135M-Instruct without a hub. GSM8K comes from the hub, or from its own files
with --source, as the README says. What serves until Ctrl-C is ended once its page was read. The exit code is 1 if a command
fails, or if the run lacks one of its steps or the exported model.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from benchmarks import recipes

HERE = Path(__file__).resolve().parents[1]
SECTION = "## Qwen3-0.6B on GSM8K with one GPU\n"
MODEL = "Qwen/Qwen3-0.6B"
DRY: dict[str, dict[str, Any]] = {
    "policy": {"tokens_per_micro_batch": 256, "dtype": "float32"},
    "algorithm": {"group_size": 2},
    "engine": {"backend": "transformers"},
    "data": {"prompts_per_step": 2, "max_prompt_tokens": 192, "max_response_tokens": 8},
    "eval": {"max_prompts": 4},
    "trainer": {"device": "cpu", "eval_every": 50},
}
"""Keys of the example that a dry run changes: sizes, engine and device, not the commands or the number of steps."""


def commands() -> list[str]:
    """Return the commands of the README's section, without their comments."""
    section = (HERE / "README.md").read_text().partition(SECTION)[2].partition("\n## ")[0]
    lines = [line.strip().partition(" #")[0].rstrip() for line in section.splitlines() if line.startswith("    fivefold ")]
    assert lines, f"the README has no commands below {SECTION.strip()}"
    return lines


def configuration(lines: list[str]) -> Path:
    """Return the example that the commands name, relative to the repository."""
    (name,) = {word for line in lines for word in line.split() if word.endswith(".yaml")}
    return Path(name)


def prepare(out: Path, example: Path, model: Path | None) -> None:
    """Write the example with the model's directory into `out`; without a model a tiny one for a dry run."""
    text = (HERE / example).read_text()
    assert MODEL in text
    if model is None:
        model = out / "model"
        rows = [{"question": f"What is {n} and 7?", "answer": f"<<{n}+7={n + 7}>>{n + 7}\n#### {n + 7}"} for n in range(300)]
        for split, part in (("train", rows[:256]), ("test", rows[256:])):
            (out / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        run = [sys.executable, "-m", "fivefold.cli"]
        for words in (
            ["train-tokenizer", "bpe", "--vocabulary", "400", "--data", f"{out}/train.jsonl", "--out", f"{out}/tokenizer"],
            ["init-model", "llama", "--tokenizer", f"{out}/tokenizer", "--positions", "256", "--out", str(model)],
        ):
            subprocess.run([*run, *words], check=True, env=recipes.environment(), stdout=subprocess.DEVNULL)
        tree = yaml.safe_load(text)
        text = yaml.safe_dump({key: {**section, **DRY.get(key, {})} for key, section in tree.items()}, sort_keys=False)
    (out / example).parent.mkdir(parents=True)
    (out / example).write_text(text.replace(MODEL, str(model.resolve())))


def run(line: str, out: Path, more: list[str]) -> bool:
    """Run a command in `out` and print it, its output and what it took; return whether it ended well."""
    words = [*shlex.split(line), *more]
    print(f"\n$ {shlex.join(words)}", flush=True)
    begin = time.perf_counter()
    # The command of this interpreter's environment.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    process = subprocess.Popen(
        words, cwd=out, env=recipes.environment() | {"PATH": path}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    page = ""
    assert process.stdout is not None
    try:
        for text in process.stdout:
            print(text, end="", flush=True)
            if "--serve" in words and (match := re.search(r"http://\S+", text)):
                page = urllib.request.urlopen(match[0].rstrip("./") + "/").read().decode()
                process.send_signal(signal.SIGINT)
                killer = threading.Timer(30, process.kill)
                killer.daemon = True
                killer.start()
        code = process.wait()
    finally:
        if process.poll() is None:
            process.kill()
    well = "<html" in page and code in (0, 128 + signal.SIGINT) if "--serve" in words else code == 0
    served = f", a page of {len(page):,} letters" if page else ""
    print(
        f"[{'ended well' if well else f'FAILED with code {code}'} after {time.perf_counter() - begin:.1f} s{served}]",
        flush=True,
    )
    return well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--model", type=Path, help="the directory of a model")
    parser.add_argument("--source", type=Path, nargs=2, help="GSM8K's own files, for a machine without the hub")
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args()
    if given.dry_run == (given.model is not None):
        parser.error("--model must name a model's directory, or --dry-run be given")
    if given.out.exists():
        parser.error(f"{given.out} must not exist yet: name another directory, or delete it first")
    # A shell lets what it starts in the background ignore Ctrl-C, and what that starts too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    out, lines = given.out.resolve(), commands()
    out.mkdir(parents=True)
    example = configuration(lines)
    prepare(out, example, given.model)
    about = recipes.described_machine()
    print(f"hardware: {about['hardware']}; commit {about['commit']}; {about['versions']}", flush=True)
    source = given.source or ([out / "train.jsonl", out / "test.jsonl"] if given.dry_run else None)
    well = True
    for line in lines:
        more = (
            ["--source", *(str(path.resolve()) for path in source)] if source and line.startswith("fivefold data ") else []
        )
        # Each command needs what the ones before it left.
        well = well and run(line, out, more)
    tree = yaml.safe_load((out / example).read_text())
    metrics = out / tree["trainer"]["run_dir"] / "metrics.jsonl"
    rows = [json.loads(text) for text in metrics.read_text().splitlines()] if metrics.exists() else []
    is_whole = [row["step"] for row in rows if row["step"]] == list(range(1, tree["trainer"]["steps"] + 1))
    is_exported = (out / "out/config.json").exists() and any((out / "out").glob("*.safetensors"))
    for row in rows:
        if scores := {key: round(value, 4) for key, value in row.items() if key.startswith("val/") and "accuracy" in key}:
            print(f"step {row['step']}: {scores}, mean reward {row.get('reward/mean')}", flush=True)
    print(f"{len(rows)} rows of metrics, {'all steps' if is_whole else 'steps are missing'}; ", end="")
    print("a model was exported" if is_exported else "no model was exported", flush=True)
    return 0 if well and is_whole and is_exported else 1


if __name__ == "__main__":
    sys.exit(main())
