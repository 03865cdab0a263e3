"""Read the words after `--from SYSTEM` (a script, YAML, arguments) as trees, `key=value` settings and options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fivefold.config.dialect import Tree
from fivefold.config.loader import ConfigError, read_mapping
from fivefold_dialects.bounds import LONGEST_KEY, Work, is_file
from fivefold_dialects.shell import read_script
from fivefold_dialects.shell_words import Script

_MOST_SETTINGS = 5000
_CONFIG = ("--config", "--config-path", "--config-dir", "--config-name")
_SHORT = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}
"""Hydra's short options -> its long options."""
_ENDS = ("|", "||", "&&", "&", ">", ">>", "<")
_LAUNCHERS = ("torch.distributed", "accelerate", "deepspeed")
"""Modules that start other programs, by the beginning of their names."""


@dataclass
class Command:
    """Trees, settings and options in the words of a command."""

    trees: list[Tree] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)
    scripts: set[Path] = field(default_factory=set)
    """Scripts that were read."""
    exported: dict[str, str] = field(default_factory=dict)
    """Variables that these scripts export."""
    work: Work = field(default_factory=Work)


def read_command(words: Sequence[str], environment: Mapping[str, str]) -> Command:
    """Return what the words of a command contain, with the scripts and YAML files that they name."""
    command = Command()
    _take(list(words), command, environment, None)
    if len(command.settings) > _MOST_SETTINGS:
        raise ConfigError([f"a command has {len(command.settings)} settings: at most {_MOST_SETTINGS} are read"])
    return command


def _take(words: list[str], command: Command, environment: Mapping[str, str], script: Script | None) -> None:
    rest = iter(_arguments(words))
    for word in rest:
        if word in _ENDS or word.startswith(("2>", "&>", "1>")):
            return
        name, equals, value = word.partition("=")
        option = _SHORT.get(name, name.replace("_", "-"))
        if option in _CONFIG:
            value = value if equals else next(rest, "")
            if option == "--config":
                command.trees.append(_yaml(value, command.work, script))
            else:
                command.options[option] = value
        elif word == "-m":
            command.options["-m"] = next(rest, "")
        elif word.startswith("-"):
            continue
        elif equals:
            command.settings.append(word)
        elif word.endswith((".yaml", ".yml")):
            command.trees.append(_yaml(word, command.work, script))
        elif script is not None and word.endswith(".sh"):
            # The words after a script are its arguments.
            _take_script(word, command, environment, script, list(rest))
        elif script is None and is_file(Path(word)) and not word.endswith(".py"):
            _take_script(word, command, environment, None, None)
        elif word.endswith(".sh"):
            raise ConfigError([f"no file at {word}"])


def _arguments(words: list[str]) -> list[str]:
    """Return the words after the program's name, also `-m MODULE`; the words before it are the launcher's."""
    for place, word in enumerate(words):
        if word == "-m" and not " ".join(words[place + 1 : place + 2]).startswith(_LAUNCHERS):
            return words[place:]
        if word.endswith(".py") and "=" not in word and not word.startswith("-"):
            return words[place + 1 :]
    return words


def _take_script(
    name: str, command: Command, environment: Mapping[str, str], caller: Script | None, arguments: list[str] | None
) -> None:
    """Read a script into `command`, or a script that the script `caller` starts with these arguments."""
    text = caller.files.get(name) if caller else None
    place = Path(name)
    if caller and text is None:
        # Such scripts are usually run from the caller's directory or one above it.
        above = Path(caller.variables.get("0", "")).parents
        place = next((path for path in (place, *(parent / place for parent in above)) if is_file(path)), place)
    if text is None:
        if not is_file(place):
            raise ConfigError([f"no file at {name[:LONGEST_KEY]}"])
        text = _text(place, command.work)
    if place in command.scripts:
        raise ConfigError([f"{name} starts itself: pass the script or command that starts training"])
    command.scripts.add(place)
    handed = dict(environment)
    if caller:
        handed |= {key: value for key, value in caller.variables.items() if key in caller.exported}
    inner = read_script(text, handed, arguments, partial(_text_near, place, command.work), str(place), command.work)
    command.exported |= {key: inner.variables[key] for key in inner.exported if key in inner.variables}
    if not inner.command:
        raise ConfigError([f"{name} has no command with key=value settings or a configuration file"])
    _take(inner.command, command, environment, inner)


def _text_near(place: Path, work: Work, name: str) -> str | None:
    """Return the text of a script that the script at `place` sources, searched from here and above it; None if missing."""
    known = [path for path in (Path(name), *(parent / name for parent in place.parents)) if is_file(path)]
    return _text(known[0], work) if known else None


def _text(place: Path, work: Work) -> str:
    try:
        return work.text(place)
    except ValueError as error:
        raise ConfigError([str(error)]) from error


def _yaml(name: str, work: Work, script: Script | None) -> Tree:
    """Return the mapping in a YAML file, which may be a file that the script writes."""
    if script is not None and name in script.files:
        return read_mapping(script.files[name], name)
    place = Path(name)
    if not is_file(place):
        raise ConfigError([f"no configuration file at {name[:LONGEST_KEY]}"])
    return read_mapping(_text(place, work), name)
