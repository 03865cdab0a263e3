"""What is written behind `--from SYSTEM` -> a tree and `key=value` words: a script, YAML, arguments as they were."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fivefold.config.dialects import SYSTEMS, Translation, Tree, merged
from fivefold.config.dialects.shell import Script, read_script
from fivefold.config.loader import ConfigError, read, read_mapping
from fivefold.files import read_text

_CONFIG = ("--config", "--config-path", "--config-dir", "--config-name")
_ENDS = ("|", "||", "&&", "&", ">", ">>", "<")


@dataclass
class _Words:
    """What was found in a command line."""

    trees: list[Tree] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)


def translate_words(system: str, words: Sequence[str], environment: Mapping[str, str]) -> Translation:
    """The run that these words ask `system` (or `system@version`) for; raises ConfigError where there is none.

    Example: `translate_words("verl", ["algorithm.adv_estimator=grpo", "data.train_files=a.parquet"], os.environ)`.
    """
    name, _, version = system.partition("@")
    if name not in SYSTEMS:
        raise ConfigError([f"--from must be one of {', '.join(SYSTEMS)}: got {name}"])
    found = _Words()
    _take(list(words), found, environment, None)
    options = found.options
    file = options.pop("--config", None)
    if file is None and "--config-name" in options:
        wanted = options["--config-name"]
        directory = Path(options.get("--config-path", options.get("--config-dir", ".")))
        known = [path for path in (directory / wanted, directory / f"{wanted}.yaml") if path.is_file()]
        file = str(known[0]) if known else None
        if file is not None:
            del options["--config-name"]
    if file is not None:
        found.trees.insert(0, _yaml(file, None))
    module = importlib.import_module(f"fivefold.config.dialects.{name}")
    try:
        tree: Tree = getattr(module, "join", merged)(found.trees)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    if not tree and not found.settings:
        raise ConfigError([f"no setting of {name} in {' '.join(words) or 'an empty command'}"])
    said = [f"{option}={value}" for option, value in options.items()]
    translation: Translation = module.translate(tree, [*said, *found.settings], environment, version)
    return translation


def _take(words: list[str], found: _Words, environment: Mapping[str, str], script: Script | None) -> None:
    rest = iter(words)
    for word in rest:
        if word in _ENDS or word.startswith(("2>", "&>", "1>")):
            return
        name, equals, value = word.partition("=")
        option = name.replace("_", "-")
        if option in _CONFIG:
            value = value if equals else next(rest, "")
            if option == "--config":
                found.trees.append(_yaml(value, script))
            else:
                found.options[option] = value
        elif word == "-m":
            found.options["-m"] = next(rest, "")
        elif word.startswith("-"):
            continue
        elif equals:
            found.settings.append(word)
        elif word.endswith((".yaml", ".yml")):
            found.trees.append(_yaml(word, script))
        elif script is None and Path(word).is_file() and not word.endswith(".py"):
            try:
                inner = read_script(read_text(Path(word)), environment)
            except ValueError as error:
                raise ConfigError([str(error)]) from error
            if not inner.command:
                raise ConfigError([f"{word} has no command with key=value settings or a configuration file"])
            _take(inner.command, found, environment, inner)
        elif word.endswith(".sh"):
            raise ConfigError([f"no file at {word}"])


def _yaml(name: str, script: Script | None) -> Tree:
    """A YAML file, or one that the script writes."""
    if script is not None and name in script.files:
        return read_mapping(script.files[name], name)
    return read(name)
