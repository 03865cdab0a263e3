"""Random damage to what a user writes: configurations, a model's config.json, data files. Every case follows from its number.

`benchmarks/attacks.py` takes as many of them as it has time for.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from fivefold.config import RunConfig, dump_yaml
from fivefold.errors import sentence_of
from fivefold.plan.check import check

SECONDS = 20
"""A case that takes longer hangs."""
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 10**6, 2**31, 2**63, 10**400, 0.0, 0.5, -0.5, 1.5, 1e-300, 1e308, math.inf, math.nan,
    "", " ", "x", "é", "nan", "1e-6", "\0", "x" * 5000, "a:b", "none.py:f", "/dev/null", "megatron:d1", "megatron:d2t2",
    "vllm:d1", "data.jsonl", [], [0], [[]], [None], [-1, 2], ["x"], {}, {"a": 1}, {"a": {"b": []}}, {1: 2}, {"x": math.nan},
]  # fmt: skip
CONFIG_VALUES = [value for value in VALUES if not isinstance(value, dict) or all(isinstance(key, str) for key in value)]
LINES = [b"{", b"null", b"[]", b"3", b'"text"', b"\xff\xfe", b"\x00", b"{}", "\u2028".encode(), b"\r", b'{"prompt"']


class Hang(BaseException):
    """Not an Exception: nothing may answer it."""


@contextmanager
def time_limit():
    def ring(number: int, frame: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def verdict(action: Callable[[], list[str]]) -> tuple[str, str]:
    """(accepted, refused or broken; what was said) of a check."""
    try:
        with time_limit():
            errors = action()
    except Hang:
        return "broken", f"took more than {SECONDS} s"
    except Exception as error:
        sentence = sentence_of(error)
        if sentence is None:
            return "broken", repr(error)
        errors = [sentence]
    return ("refused", "\n".join(errors)) if errors else ("accepted", "")


class Inputs:
    """A good run, whose files are spoiled and mended again."""

    def __init__(self, root: Path) -> None:
        from tests.support.tiny_models import make_model, make_tokenizer

        self.root, self.model, self.data, self.file = root, root / "model", root / "data.jsonl", root / "run.yaml"
        make_model("qwen3", self.model, num_hidden_layers=2)
        make_tokenizer(self.model)
        self.config_json = json.loads((self.model / "config.json").read_text())
        rows = [
            {"data_source": "arithmetic", "prompt": f"{n}+1=", "reward_model": {"style": "rule", "ground_truth": str(n + 1)}}
            for n in range(8)
        ]
        self.rows: list[dict[str, Any]] = [
            {**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows[:4]
        ]
        self.rows += rows[4:]
        self.data.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        config = RunConfig.of(
            model={"path": str(self.model)},
            policy={"dtype": "float32", "tokens_per_micro_batch": 128},
            algorithm={"group_size": 2},
            data={"train": [str(self.data)], "prompts_per_step": 4, "max_prompt_tokens": 24, "max_response_tokens": 8},
            trainer={"device": "cpu", "run_dir": str(root / "run"), "steps": 1, "loggers": []},
        )
        self.tree = yaml.safe_load(dump_yaml(config))
        self.file.write_text(_yaml(self.tree))

    def check(self) -> list[str]:
        return check(RunConfig.from_yaml(self.file)).errors

    # --- run.yaml ----------------------------------------------------------------------------------------------------

    def spoil_config(self, number: int) -> None:
        """Values in other places, keys of other names, or a damaged text."""
        draw = random.Random(number)
        tree = json.loads(json.dumps(self.tree))
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            spoil(tree, draw, CONFIG_VALUES)
        text = _yaml(tree)
        if draw.random() < 0.2:
            text = _spoil_text(text, draw)
        self.file.write_bytes(text.encode("utf-8", "surrogateescape"))

    # --- config.json -------------------------------------------------------------------------------------------------

    def spoil_model(self, number: int) -> None:
        draw = random.Random(number)
        spoiled = json.loads(json.dumps(self.config_json))
        for _ in range(draw.choice([1, 1, 2])):
            spoil(spoiled, draw, CONFIG_VALUES)
        text = json.dumps(spoiled, default=str)
        if draw.random() < 0.1:
            text = _spoil_text(text, draw)
        (self.model / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))

    def mend_model(self) -> None:
        (self.model / "config.json").write_text(json.dumps(self.config_json))

    # --- data --------------------------------------------------------------------------------------------------------

    def spoil_data(self, number: int) -> Path:
        """A file of rows with other values, other lines, or bytes that are gone."""
        draw = random.Random(number)
        rows = json.loads(json.dumps(self.rows))
        for _ in range(draw.choice([0, 1, 1, 2])):
            spoil(draw.choice(rows), draw, CONFIG_VALUES)
        if draw.random() < 0.3:
            return self._parquet(rows, draw)
        if draw.random() < 0.2:
            return self._saved(rows, draw)
        lines = [json.dumps(row, default=str).encode() for row in rows]
        if draw.random() < 0.3:
            lines.insert(draw.randrange(len(lines)), draw.choice(LINES))
        content = b"\n".join(lines) + b"\n" * draw.choice([0, 1, 1, 2])
        if draw.random() < 0.3:
            content = spoil_bytes(content, draw)
        path = self.root / f"spoiled{draw.choice(['.jsonl', '.json'])}"
        path.write_bytes(content)
        return path

    def _parquet(self, rows: list[dict[str, Any]], draw: random.Random) -> Path:
        import pyarrow
        import pyarrow.parquet

        path = self.root / "spoiled.parquet"
        try:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[:4]), path)
        except (pyarrow.ArrowException, OverflowError):
            # Values of several types in a column: no parquet file can hold them.
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(self.rows[:4]), path)
        if draw.random() < 0.7:
            path.write_bytes(spoil_bytes(path.read_bytes(), draw))
        return path

    def _saved(self, rows: list[dict[str, Any]], draw: random.Random) -> Path:
        """A directory as `save_to_disk` writes it."""
        import pyarrow

        path = self.root / "spoiled"
        path.mkdir(exist_ok=True)
        try:
            table = pyarrow.Table.from_pylist(rows[:4])
        except (pyarrow.ArrowException, OverflowError):
            table = pyarrow.Table.from_pylist(self.rows[:4])
        with pyarrow.OSFile(str(path / "data.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
        state: dict[str, Any] = {"_data_files": [{"filename": "data.arrow"}], "_split": "train"}
        if draw.random() < 0.3:
            state["_data_files"] = draw.choice(VALUES) if draw.random() < 0.5 else [{"filename": draw.choice(VALUES)}]
        (path / "state.json").write_text(json.dumps(state, default=str))
        name = draw.choice(["data.arrow"] * 6 + ["state.json", ""])
        if name:
            (path / name).write_bytes(spoil_bytes((path / name).read_bytes(), draw))
        return path


def spoil(tree: Any, draw: random.Random, values: list[Any]) -> None:
    """Change one value somewhere in a tree of mappings."""
    node = tree
    while True:
        inner = [value for value in node.values() if isinstance(value, dict) and value]
        if not inner or draw.random() < 0.4:
            break
        node = draw.choice(inner)
    key = draw.choice(list(node)) if node else "new"
    change = draw.random()
    if change < 0.8:
        node[key] = copy.deepcopy(draw.choice(values))
    elif change < 0.9:
        node.pop(key, None)
    else:
        node[f"{key}x"] = copy.deepcopy(draw.choice(values))


def _yaml(tree: Any) -> str:
    """Return the tree as YAML, written by libyaml where PyYAML has it, which is faster."""
    return str(yaml.dump(tree, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), allow_unicode=True))


def _spoil_text(text: str, draw: random.Random) -> str:
    return spoil_bytes(text.encode(), draw).decode("utf-8", "surrogateescape")


def spoil_bytes(content: bytes, draw: random.Random) -> bytes:
    spoiled = bytearray(content)
    kind = draw.random()
    if kind < 0.3:
        return bytes(spoiled[: draw.randrange(len(spoiled) + 1)])
    if kind < 0.6:
        for _ in range(draw.choice([1, 3, 30])):
            spoiled[draw.randrange(len(spoiled))] = draw.randrange(256)
    elif kind < 0.75:
        place = draw.randrange(len(spoiled))
        spoiled[place:place] = draw.choice(
            [b"[" * 3000, b"{a: " * 3000, b"- " * 3000, b"&a [*a]", b"!!python/name:os.system ''", b"\t"]
        )
    else:
        begin, end = sorted(draw.randrange(len(spoiled) + 1) for _ in range(2))
        del spoiled[begin:end]
    return bytes(spoiled)


# --- oracles -------------------------------------------------------------------------------------------------------------


def trainable_data(inputs: Inputs) -> list[str]:
    """What training itself says of the data, with its own tokenizer."""
    from fivefold.build import build_data, check_rewards
    from fivefold.data.prompt_loader import PromptLoader
    from fivefold.data.tokenizer import load_tokenizer

    config = RunConfig.from_yaml(inputs.file)
    # Every rank reads small files by itself, without the other ranks.
    no_ranks: Any = None
    training, evaluation = build_data(config, load_tokenizer(str(inputs.model)), inputs.model, no_ranks)
    check_rewards(config, training, evaluation)
    PromptLoader(training.prompts, config.data.prompts_per_step, 0, True)
    return []


def usable_model(inputs: Inputs) -> list[str]:
    """What transformers says of a model's configuration, and of a model of it."""
    import torch
    import transformers

    from fivefold.data.tokenizer import check_config

    check_config(inputs.model)
    config = transformers.AutoConfig.from_pretrained(inputs.model)
    with torch.device("meta"):
        transformers.AutoModelForCausalLM.from_config(config)
    return []


def fuzz_configs(inputs: Inputs, numbers: range) -> tuple[Counter[str], list[str]]:
    """(how many of each verdict, what is wrong) of so many spoiled configurations."""
    counts: Counter[str] = Counter()
    broken: list[str] = []
    for number in numbers:
        inputs.spoil_config(number)
        kind, message = verdict(inputs.check)
        counts[kind] += 1
        if kind == "broken":
            broken.append(f"configuration {number}: {message}")
    inputs.file.write_text(_yaml(inputs.tree))
    return counts, broken


def fuzz_models(inputs: Inputs, numbers: range) -> tuple[Counter[str], list[str]]:
    """The same of config.json; what is accepted, transformers must accept."""
    counts: Counter[str] = Counter()
    broken: list[str] = []
    for number in numbers:
        inputs.spoil_model(number)
        kind, message = verdict(inputs.check)
        if kind == "accepted":
            later, message = verdict(lambda: usable_model(inputs))
            kind = kind if later == "accepted" else "broken"
        counts[kind] += 1
        if kind == "broken":
            broken.append(f"config.json {number}: {message}")
    inputs.mend_model()
    return counts, broken


def fuzz_data(inputs: Inputs, numbers: range) -> tuple[Counter[str], list[str]]:
    """The same of data files; what is accepted, training must accept, and what is refused it must refuse in a sentence too."""
    counts: Counter[str] = Counter()
    broken: list[str] = []
    for number in numbers:
        tree = json.loads(json.dumps(inputs.tree))
        tree["data"]["train"] = [str(inputs.spoil_data(number))]
        inputs.file.write_text(_yaml(tree))
        kind, message = verdict(inputs.check)
        later, then = verdict(lambda: trainable_data(inputs))
        if later == "broken" or (kind, later) == ("accepted", "refused"):
            kind, message = "broken", f"{kind} by check, then: {then}"
        counts[kind] += 1
        if kind == "broken":
            broken.append(f"data file {number}: {message}")
    inputs.file.write_text(_yaml(inputs.tree))
    return counts, broken


def fuzz_training(inputs: Inputs, numbers: range) -> tuple[Counter[str], list[str]]:
    """What check accepts must train: a step of every accepted configuration, from the command line."""
    from tests.support.commands import Command

    counts: Counter[str] = Counter()
    broken: list[str] = []
    before = os.getcwd()
    os.chdir(inputs.root)
    try:
        for number in numbers:
            inputs.spoil_config(number)
            if verdict(inputs.check)[0] != "accepted":
                continue
            done = Command("train", inputs.file, "trainer.steps=1", "launch.threads=1").finish()
            counts["trained" if done.returncode == 0 else "failed"] += 1
            if done.returncode:
                broken.append(f"configuration {number} ended with {done.returncode}: {done.stderr[-1500:]}")
            shutil.rmtree(inputs.root / "run", ignore_errors=True)
    finally:
        os.chdir(before)
    inputs.file.write_text(_yaml(inputs.tree))
    return counts, broken
