"""Read TRL's command line: a launcher, the name of a program, `--key value` options, and the files in them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fivefold.config.dialect import Tree
from fivefold.config.loader import ConfigError, parse_value, read_mapping
from fivefold_dialects.bounds import LONGEST_KEY, Work, is_file
from fivefold_dialects.shell import read_script
from fivefold_dialects.source import merged

_COMMANDS = ("grpo", "dpo", "sft", "kto", "rloo", "reward", "distillation")
_LAUNCHES = re.compile(r"(torch\.distributed|accelerate|deepspeed)\b|(torchrun|trl)$")
_END = re.compile(r"[|&;<>]+|\d?>.*|&>.*")
_OPTION = re.compile(r"--?[A-Za-z]")
_ALIASES = {"nproc_per_node": "num_processes", "num_gpus": "num_processes", "config_file": "accelerate_config"}
"""Options of torchrun, deepspeed and accelerate -> options of `trl`."""


def read_tree(given: Sequence[str], variables: Mapping[str, str]) -> Tree:
    """Return the settings of the run that these words describe; raise ConfigError if they describe none."""
    words, work = list(given), Work()
    files: Mapping[str, str] = {}
    first = Path(words[0]) if words else Path()
    if is_file(first) and first.suffix not in (".yaml", ".yml", ".py"):
        script = read_script(work.text(first), variables, name=str(first), work=work)
        commands = [command for command in script.commands if _program(command)[0]]
        if not commands:
            raise ConfigError([f"{first} has no command that starts a program of TRL"])
        # A script may prepare data before training, and evaluate after it.
        words = next((command for command in reversed(commands) if _program(command)[0] in _COMMANDS), commands[-1])
        files = script.files
    name, place = _program(words)
    tree: Tree = {"-m": name, **dict(_launch(words[:place]))} if name else {}
    settings = dict(_options(words[place + 1 :]))
    below = _read(str(settings.pop("config")), files, work) if "config" in settings else {}
    if not name and not below and not settings:
        raise ConfigError([f"no setting of TRL in {' '.join(words)[:LONGEST_KEY] or 'an empty command'}"])
    tree = merged([tree, below, settings])
    profile = str(tree.get("accelerate_config", ""))
    if profile in files or is_file(Path(profile)):
        tree["accelerate"] = _read(profile, files, work)
    elif profile:
        # A name as in TRL's repository: accelerate_configs/deepspeed_zero3.yaml.
        tree["accelerate_config"] = Path(profile).name.removesuffix(".yaml").removeprefix("deepspeed_")
    return tree


def _read(name: str, files: Mapping[str, str], work: Work) -> Tree:
    """Return the mapping in a YAML file, or in one that the script writes."""
    if name not in files and not is_file(Path(name)):
        raise ConfigError([f"no configuration file at {name[:LONGEST_KEY]}"])
    return read_mapping(files[name] if name in files else work.text(Path(name)), name)


def _program(words: Sequence[str]) -> tuple[str, int]:
    """Return (program, its index) of a command: a word after `trl`, a Python file or a module after -m; ("", -1) if none."""
    for place, word in enumerate(words):
        before = words[place - 1].rpartition("/")[2] if place else "trl"
        if word in _COMMANDS and before == "trl":
            return word, place
        if before == "-m" and not _LAUNCHES.match(word):
            return word.rpartition(".")[2], place
        if word.endswith(".py") and "=" not in word:
            return Path(word).stem, place
    return "", -1


def _launch(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the launcher's options; without a launcher, Python starts one process."""
    places = [place for place, word in enumerate(words) if _LAUNCHES.match(word.rpartition("/")[2])]
    if words and not places:
        yield "num_processes", 1
    options = {
        _ALIASES.get(key, key): value for key, value in _options(words[places[0] + 1 :] if places else ()) if key != "m"
    }
    counts = [str(options.get(key, "1")) for key in ("num_processes", "nnodes")]
    if "nnodes" in options and all(map(str.isdigit, counts)):
        options["num_processes"] = int(counts[0]) * int(counts[1])
    yield from options.items()


def _options(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of options as transformers' parser reads them (`--key value...`, `--key=value`, `--flag`,
    `--no_flag`), and of `key=value` words and a YAML file before them."""
    rest = list(itertools.takewhile(lambda word: not _END.fullmatch(word), words))
    starts = [place for place, word in enumerate(rest) if _OPTION.match(word)]
    for word in rest[: min(starts, default=len(rest))]:
        key, equals, value = word.partition("=")
        if equals or word.endswith((".yaml", ".yml")):
            yield (key, value) if equals else ("config", word)
    for place, end in itertools.pairwise([*starts, len(rest)]):
        key, equals, value = rest[place].lstrip("-").partition("=")
        key, values = key.replace("-", "_"), [value] * bool(equals) + rest[place + 1 : end]
        if values:
            yield key, values if len(values) > 1 else parse_value(values[0]) if values[0].startswith("{") else values[0]
        else:
            yield key.removeprefix("no_"), not key.startswith("no_")
