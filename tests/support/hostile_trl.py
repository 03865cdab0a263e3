"""Command lines and YAML of TRL that mean harm. Every case follows from its number, like those of `fuzz.py`.

`benchmarks/attacks.py` takes as many of them as it has time for.
"""

from __future__ import annotations

import math
import random
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from fivefold.config import RunConfig
from fivefold.config.loader import read_mapping
from fivefold.terminal import plain
from fivefold_dialects import writer
from fivefold_dialects.source import flatten
from fivefold_dialects.trl import TABLES
from tests.support.dialects import translate_words
from tests.support.fuzz import spoil_bytes, verdict

PROGRAMS = {
    "grpo": {"model_name_or_path": "m", "dataset_name": "a/b", "reward_funcs": "accuracy_reward"},
    "dpo": {"model_name_or_path": "m", "dataset_name": "a/b"},
    "sft": {"model_name_or_path": "m", "dataset_name": "a/b", "completion_only_loss": "true"},
}
"""Program -> settings that are translated."""
SWITCHES = {
    "use_peft": "true", "lora_dropout": "0", "use_vllm": "true", "vllm_mode": "server", "eval_strategy": "steps",
    "save_strategy": "epoch", "max_steps": "100", "beta": "0.1", "loss_type": "cispo", "assistant_only_loss": "true",
    "lr_scheduler_type": "cosine_with_min_lr", "generation_batch_size": "64", "num_processes": "4",
}  # fmt: skip
"""Settings that make others count."""
NUMBERS = (
    "nan", ".nan", "inf", "-.inf", "1e999", "-1e999", "1e308", "1e-308", "1e39", "-1", "0", "-0.0", "0.5", "1_000", "0x10",
    "0o17", "1:30:00", "9" * 30, "9" * 400, "9" * 5000, "0x" + "f" * 5000, "²", "٣", "1e", "--1", "+1", "2147483648",
    "9223372036854775808",
)  # fmt: skip
TEXTS = (
    "", " ", "~", "null", "None", "true", "no", "'", '"', "''", "[", "{", "[]", "{}", "[[]]", "[null]", "[1, x]", "[nan]",
    "[[1]]", "{a: 1}", "{a: {b: [c]}}", "{1: 2}", "{null: 1}", "[a, [b]]", "(1", "x", "é", "x" * 5000, "a\nb", "a\rb", "a\0b",
    "\x1b[2J\x1b]0;title\x07", "\u202e\u2028", "\ud800", "\x7f\x9b31m", "${x}", "${a.b}", "${oc.env:HOME}", "$HOME", "${",
    "${beta}", "$(touch ran)", "`touch ran`", "!!python/object/apply:os.system [touch ran]", "&a [*a]", "*a", "a: b: c", "# c",
    "- a", "--", "--beta", "-m", "../../../etc/passwd", "/dev/zero", "~/x", "file:///etc/passwd", "a/b:c/d", "2020-13-45",
    "2020-01-01", "!!binary aGk=", "!!set {a, b}", "? [1]\n: 2", "none", "all", "{path: x}", "[{path: json, data_files: 3}]",
    "[{path: json, data_files: [[1]]}]", "[{path: x, name: [1], split: {}}]", '{"min_lr": [1]}', '{"num_cycles": "x"}',
    '{"stop": 3, "top_k": "x", "min_p": [1]}', '{"a.b": 1, "": 2, " ": 3}',
)  # fmt: skip
TREES: tuple[Any, ...] = (
    None, True, 0, -1, 2**63, 10**400, math.nan, math.inf, 1e308, [], [[]], [None], [math.nan], [[1], {"a": 1}], {},
    {"a": {"b": 1}}, {"a": None}, {1: 2}, {"x" * 500: 1}, {"": 1}, {"a.b": {"": 1}}, "x", ["x"] * 1000,
)  # fmt: skip
"""Values as YAML holds them."""
FILES = {
    "aliases that double": "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)),
    "mappings that double": "a0: &a0 {x: 1}\n"
    + "".join(f"a{i}: &a{i} {{a: *a{i - 1}, b: *a{i - 1}}}\n" for i in range(1, 40)),
    "merges that double": "a0: &a0 {x: 1, y: 2}\n"
    + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40)),
    "a merge": "a0: &a0 {x: 1}\na1: {<<: *a0}\n",
    "a ring": "beta: &a [*a]\n",
    "a ring of mappings": "beta: &a {b: *a}\n",
    "a ring of merges": "beta: &a {<<: *a}\n",
    "a number of minutes": "max_steps: 1" + ":59" * 60_000 + "\n",
    "a number of hexadecimal digits": "max_steps: 0x" + "f" * 200_000 + "\n",
    "a number of binary digits": "max_steps: 0b" + "1" * 200_000 + "\n",
    "a key without a value": "? beta\n",
    "a list as a key": "? [beta]\n: 1\n",
    "keys that are no text": "1: 2\nnull: 3\n1.5: 4\ntrue: 5\n2020-01-01: 6\n",
    "several documents": "beta: 1\n---\nbeta: 2\n",
    "an object": "beta: !!python/object/apply:os.system ['touch ran']\n",
    "bytes": "beta: !!binary |\n  aGVsbG8=\n",
    "a set": "reward_funcs: !!set {a, b}\n",
    "pairs": "reward_funcs: !!pairs [a: 1, b: 2]\n",
    "an ordered mapping": "model_init_kwargs: !!omap [a: 1, b: 2]\n",
    "a date": "max_steps: 2020-01-01\n",
    "a long list": "reward_funcs: [" + "a.b, " * 40_000 + "]\n",
    "many keys": "".join(f"misspelled{number}: 1\n" for number in range(10_000)),
    "brackets": "beta: " + "[" * 5_000 + "]" * 5_000 + "\n",
    "quotes": "beta: " + "'" * 100_001 + "\n",
    "anchors": "".join(f"k{number}: &a{number} x\n" for number in range(5_000)),
    "tabs": "\tbeta: 1\n",
    "a byte order mark": "\ufeffbeta: 1\n",
    "control letters": 'output_dir: "a\\e[2J\\0b"\nrun_name: "\\x9b31m\\u202e"\n',
}
"""Name -> text of a YAML file."""
SCRIPTS = (
    "trl grpo {}", "accelerate launch --num_processes {} grpo.py {}", "torchrun --nproc_per_node={} --nnodes {} grpo.py {}",
    "trl grpo {} {} {}", "python -m trl.scripts.sft {}", "X={}\ntrl dpo $X", "trl sft --config {} {}", "trl {} {}",
    "deepspeed --num_gpus {} grpo.py --{}", "trl grpo <<< {}", "trl grpo --config <(echo {})",
)  # fmt: skip


class Trl:
    """Reads a command line of TRL as `--from trl` does: it ends in a translation or in sentences, and whatever is translated is
    a configuration with numbers, which its run.yaml holds too."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._keys = {name: sorted(table.exact) for name, table in TABLES.items()}

    def __call__(self, number: int) -> tuple[str, str]:
        draw = random.Random(number)
        words = self._words(draw)
        result: list[str] = []

        def read() -> list[str]:
            translation = translate_words("trl", words, {"HOME": "/home/me"})
            # What is printed may become a file.
            text = plain(writer.write(translation, "trl"))
            plain("".join([text, *writer.notes(translation), *translation.refusals])).encode()
            if translation.refusals:
                return translation.refusals
            config = RunConfig.from_tree(translation.tree)
            if numbers := [key for key, value in flatten(asdict(config)) if _is_no_number(value)]:
                result.append(f"no numbers: {', '.join(numbers)}")
            if _run(RunConfig.from_tree(read_mapping(text, "run.yaml"))) != _run(config):
                result.append(f"run.yaml is another run:\n{text}")
            return []

        kind, message = verdict(read)
        if (self._root / "ran").exists():
            result.append("something was executed")
        if kind == "broken":
            result.append(message)
        fault = "; ".join(result)
        return kind, f"{fault[:1500]}: {shlex.join(word[:300] for word in words[:40])}" if fault else ""

    def close(self) -> None:
        """Nothing was started."""

    def _words(self, draw: random.Random) -> list[str]:
        """Words of a program, whose settings are on the command line, in YAML or in a script."""
        kind = draw.random()
        if kind < 0.15:
            return self._of_a_script(draw)
        name = draw.choice(sorted(PROGRAMS))
        given: dict[str, Any] = dict(PROGRAMS[name])
        for switch in draw.sample(sorted(SWITCHES), draw.choice([0, 0, 1, 2, 3])):
            given[switch] = SWITCHES[switch]
        for _ in range(draw.choice([1, 1, 2, 3])):
            key = draw.choice([*self._keys[name], *given, *SWITCHES])
            value = draw.choice([*NUMBERS, *TEXTS, *((*TREES,) if kind > 0.6 else ())])
            given[f"{key}{draw.choice(['.x', '.', 'x', ' ', '-'])}" if draw.random() < 0.1 else key] = value
        if kind > 0.6:
            return ["trl", name, "--config", self._file(_yaml(given, draw), draw)]
        if kind > 0.5:
            return ["trl", name, "--config", self._file(draw.choice(list(FILES.values())) + _yaml(given, draw), draw)]
        options = [word for key, value in given.items() for word in draw.choice(_forms(key, str(value)))]
        if draw.random() < 0.2:
            options.insert(draw.randrange(len(options) + 1), draw.choice(TEXTS))
        return ["trl", name, *options]

    def _of_a_script(self, draw: random.Random) -> list[str]:
        script = draw.choice(SCRIPTS)
        while "{}" in script:
            script = script.replace("{}", draw.choice([*NUMBERS, *TEXTS, "--beta=1", *_SETTINGS]), 1)
        return [self._file(script, draw, "run.sh")]

    def _file(self, text: str, draw: random.Random, name: str = "run.yaml") -> str:
        content = text.encode("utf-8", "surrogateescape" if "\udc80" in text else "replace")
        if draw.random() < 0.2:
            content = spoil_bytes(content, draw)
        path = self._root / name
        path.write_bytes(content)
        return str(path)


_SETTINGS = tuple(" ".join(f"--{key} {value}" for key, value in settings.items()) for settings in PROGRAMS.values())


def _forms(key: str, value: str) -> list[list[str]]:
    """The ways to write an option."""
    return [[f"--{key}", value], [f"--{key}={value}"], [f"--{key}"], [f"--{key}", value, value], [f"{key}={value}"]]


def _yaml(tree: dict[str, Any], draw: random.Random) -> str:
    """Lines of YAML; a text that is no YAML of its own stands as it is."""
    plain = draw.random() < 0.5
    lines = (
        f"{key}: {value}\n" if plain and isinstance(value, str) else yaml.safe_dump({key: value}, allow_unicode=True)
        for key, value in tree.items()
    )
    return "".join(lines)


def _run(config: RunConfig) -> Any:
    """Return a configuration with its method resolved, so that two spellings of the same run are equal."""
    resolved: Any = config.algorithm.resolved
    return replace(config, algorithm=resolved)


def _is_no_number(value: Any) -> bool:
    return (
        any(map(_is_no_number, value))
        if isinstance(value, list | tuple)
        else isinstance(value, float) and not math.isfinite(value)
    )
