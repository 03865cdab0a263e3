"""A system whose runs are read: its tables, the words of its commands, and the run.yaml that is written from them."""

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
    """A dialect: called with a tree and `key=value` words, it returns their translation."""

    name: str
    """As it stands after `--from`."""
    tables: tuple[Table, ...]
    """One for each program of the system with keys of its own; the first is the one that most users run."""
    choose: Callable[[Mapping[str, Any]], Table] | None = None
    """Settings -> the table that fits them; without it the first does."""
    config_names: tuple[str, ...] = ()
    """YAML files of the system itself, whose values are the defaults of its tables."""
    join: Callable[[list[Tree]], Tree] = merged
    """Joins the files that a command names into one tree."""
    variables: Sequence[str] = ()
    """Variables of the environment that its programs read: the tables have rows for them as for keys."""

    def __call__(
        self, tree: Tree, overrides: list[str], /, environment: Mapping[str, str] | None = None, version: str = ""
    ) -> Translation:
        """Translate settings; `version` is the month of an older release, `environment` has the variables left open."""
        settings = settings_of(tree, overrides)
        table = self.choose(settings) if self.choose else self.tables[0]
        if version and (fault := self._version_fault(table, version)):
            raise UserError(fault)
        release = version or table.release_of(settings)
        defaults = {**table.elsewhere, **table.defaults, **table.versions.get(release, {})}
        translation = translate(table, settings, defaults, os.environ if environment is None else environment)
        return dataclasses.replace(translation, release=release)

    def translate_words(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        given: Mapping[str, str] | None = None,
        *,
        version: str = "",
        allow_secrets: bool = False,
    ) -> Translation:
        """Translate the words of a command, as `SystemDialect` in the core has it."""
        hidden = Hidden({} if allow_secrets else environment)
        variables = {**environment, **hidden.environment, **(given or {})}
        try:
            return hidden.checked(self._of_command(words, variables, version))
        except TooMuchError as error:
            raise ConfigError([str(error)]) from error
        except RecursionError:
            raise ConfigError([_TOO_DEEP]) from None

    def _of_command(self, words: Sequence[str], environment: Mapping[str, str], version: str) -> Translation:
        """Translate a command; what follows `--` are settings of ours, which come over those of the system."""
        theirs, own = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, ())
        found = read_command(theirs, environment)
        notes = []
        if (path := named_yaml(found.options, found.scripts, self.config_names)) is not None:
            found.trees.insert(0, with_defaults(path, self.config_names))
            notes.append(f"--config-name is the file {path}")
        try:
            tree = self.join(found.trees)
        except ValueError as error:
            raise ConfigError([str(error)]) from error
        if not tree and not found.settings:
            raise ConfigError([f"no setting of {self.name} in {' '.join(theirs)[:LONGEST_KEY] or 'an empty command'}"])
        options = [f"{option}={value}" for option, value in found.options.items()]
        exported = {**environment, **found.exported}
        variables = [f"{name}={exported[name]}" for name in self.variables if exported.get(name)]
        translation = self(tree, [*variables, *options, *found.settings], environment, version)
        return with_own(dataclasses.replace(translation, notes=[*notes, *translation.notes]), own)

    def write(self, translation: Translation, *, strict: bool = True) -> str:
        """Return the translated run as a commented YAML file."""
        return writer.write(translation, self.name, strict=strict)

    def notes(self, translation: Translation) -> list[str]:
        """Return sentences about the translated run for the terminal, the first with the counts of keys."""
        return [f"of {self.name}'s keys {writer.summary(translation)}", *writer.notes(translation)]

    def _version_fault(self, table: Table, version: str) -> str | None:
        if not table.versions:
            return f"this program of {table.name} has no older defaults here: say --from {self.name} without @{version}"
        fault = OneOf(table.versions).fault(version)
        return fault and f"the version of {table.name} {fault}"


def dialect(name: str, *tables: Table, **options: Any) -> System:
    """Make the dialect of a system from its tables; `options` are further fields of System."""
    return System(name, tables, **options)
