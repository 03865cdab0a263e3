"""Define one supported system: its tables, how its commands are read, and the run.yaml that is written from them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fivefold.config.dialect import Translation, Tree
from fivefold.config.loader import ConfigError
from fivefold.errors import UserError
from fivefold.keys.ranges import OneOf
from fivefold_dialects import writer
from fivefold_dialects.bounds import LONGEST_KEY, TooMuchError
from fivefold_dialects.command import read_command
from fivefold_dialects.config_names import named_yaml, with_defaults
from fivefold_dialects.secret_variables import Hidden
from fivefold_dialects.source import merged
from fivefold_dialects.table import Table
from fivefold_dialects.translator import settings_of, translate, with_own

_TOO_DEEP = "brackets, functions or scripts are nested too deeply: give the settings of the command that starts training"


@dataclass(frozen=True)
class System:
    """One supported system; calling it with a tree and `key=value` words returns their translation."""

    name: str
    """Name of the system after `--from`."""
    tables: tuple[Table, ...]
    """One table for each program of the system that has its own keys; the first is the program that most users run."""
    choose: Callable[[Mapping[str, Any]], Table] | None = None
    """Function that returns the table for some settings; without it the first table is used."""
    config_names: tuple[str, ...] = ()
    """Names of the system's own YAML files; their values are already the defaults of its tables."""
    join: Callable[[list[Tree]], Tree] = merged
    """Function that joins the files of a command into one tree."""
    read_tree: Callable[[Sequence[str], Mapping[str, str]], Tree] | None = None
    """Function that reads a command of options, `--key value`; without it a command has `key=value` words."""
    variables: Sequence[str] = ()
    """Environment variables that the system's programs read; the tables have rows for them as for keys."""

    def __call__(
        self, tree: Tree, overrides: list[str], /, environment: Mapping[str, str] | None = None, version: str = ""
    ) -> Translation:
        """Return the translation of settings; `version` is the month of an older release, `environment` has variables."""
        settings = settings_of(tree, overrides)
        table = self.choose(settings) if self.choose else self.tables[0]
        if version and (fault := self._version_fault(table, version)):
            raise UserError(fault)
        release = version or table.release_of(settings)
        defaults = {**table.elsewhere, **table.defaults, **table.versions.get(release, {})}
        translation = translate(table, settings, defaults, os.environ if environment is None else environment)
        return dataclasses.replace(translation, release=release)

    def translate_words(
        self, words: Sequence[str], environment: Mapping[str, str], given: Mapping[str, str] = {}, *, version: str = ""
    ) -> Translation:
        """Return the translation of the words of a command; see `SystemDialect` in the core."""
        hidden = Hidden(environment)
        variables = {**hidden.environment, **given}
        try:
            return hidden.checked(self._of_command(words, variables, version))
        except TooMuchError as error:
            raise ConfigError([str(error)]) from error
        except RecursionError:
            raise ConfigError([_TOO_DEEP]) from None

    def _of_command(self, words: Sequence[str], environment: Mapping[str, str], version: str) -> Translation:
        """Return the translation of a command; after `--` come our own settings, which override those of the system."""
        theirs, ours = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, ())
        if self.read_tree is not None:
            return with_own(self(self.read_tree(theirs, environment), [], environment, version), ours)
        command = read_command(theirs, environment)
        notes = []
        if (path := named_yaml(command.options, command.scripts, self.config_names)) is not None:
            command.trees.insert(0, with_defaults(path, self.config_names))
            notes.append(f"--config-name is the file {path}")
        try:
            tree = self.join(command.trees)
        except ValueError as error:
            raise ConfigError([str(error)]) from error
        if not tree and not command.settings:
            raise ConfigError([f"no setting of {self.name} in {' '.join(theirs)[:LONGEST_KEY] or 'an empty command'}"])
        options = [f"{option}={value}" for option, value in command.options.items()]
        exported = {**environment, **command.exported}
        variables = [f"{name}={exported[name]}" for name in self.variables if exported.get(name)]
        translation = self(tree, [*variables, *options, *command.settings], environment, version)
        return with_own(dataclasses.replace(translation, notes=[*notes, *translation.notes]), ours)

    def write(self, translation: Translation, *, strict: bool = True) -> str:
        """Return the translated run as a commented YAML file."""
        return writer.write(translation, self.name, strict=strict)

    def notes(self, translation: Translation) -> list[str]:
        """Return sentences about the translated run for the terminal, the first with the counts of keys."""
        return [f"of {self.name}'s keys {writer.summary(translation)}", *writer.notes(translation)]

    def _version_fault(self, table: Table, version: str) -> str | None:
        if not table.versions:
            return f"this program of {table.name} has no older defaults here: write --from {self.name} without @{version}"
        fault = OneOf(table.versions).fault(version)
        return fault and f"the version of {table.name} {fault}"
