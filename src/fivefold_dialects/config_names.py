"""Find the YAML file that Hydra's `--config-name` means, and the files in its `defaults`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from fivefold.config.dialect import Tree
from fivefold.config.loader import ConfigError, read
from fivefold_dialects.bounds import is_file
from fivefold_dialects.source import merged

_DIRECTORIES = ("--config-path", "--config-dir")
_COMPUTED = re.compile(r"^.*(\$\([^()]*\)|\$\{\w+\}|\$\w+)/?")
"""Beginning of a directory that only running the script gives, such as `$(pwd)/`."""


def named_yaml(options: dict[str, str], scripts: Iterable[Path], known: Collection[str]) -> Path | None:
    """Return the file of `--config-name` and remove this option; None if the name is one of `known` or is not given.
    The file is searched from the working directory and from the directories above the scripts, where such scripts are
    usually run. Raise ConfigError if the name is not in `known` and no file is found."""
    wanted = options.get("--config-name")
    if wanted is None:
        return None
    directory_set = next((options[option] for option in _DIRECTORIES if option in options), None)
    if directory_set is None and wanted.removesuffix(".yaml") in known:
        return None
    # `$(pwd)` of the root gives two slashes, which Python reads as another place.
    directory = _COMPUTED.sub("", directory_set or ".").removeprefix("file://").replace("//", "/")
    directories = list(_places(Path(directory or "."), scripts))
    for place in directories:
        for path in (place / wanted, place / f"{wanted}.yaml"):
            if is_file(path):
                del options["--config-name"]
                return path
    if wanted.removesuffix(".yaml") in known:
        return None
    looked = ", ".join(map(str, directories))
    without = f"; known without a file are {', '.join(known)}" if known else ""
    raise ConfigError(
        [f"--config-name must name an existing YAML file: got {wanted}, and searched in {looked}{without}; "
         "give its directory with --config-path, or run the script from its repository's root"]
    )  # fmt: skip


def with_defaults(path: Path, known: Collection[str]) -> Tree:
    """Return the mapping in a YAML file, merged over the files in its `defaults`; raise ConfigError if one is missing."""
    tree = read(path)
    names = tree.get("defaults")
    below: list[Tree] = []
    for name in names if isinstance(names, list) and known else []:
        if not isinstance(name, str) or name == "_self_" or name in known:
            continue
        file = path.parent / f"{name.removesuffix('.yaml')}.yaml"
        if not is_file(file) or file == path:
            raise ConfigError(
                [f"{path}: defaults must name YAML files next to it, or {', '.join(known)}: got {name}, and no {file}"]
            )
        below.append(with_defaults(file, known))
    return merged([*below, tree])


def _places(directory: Path, scripts: Iterable[Path]) -> Iterable[Path]:
    yield directory
    here = Path.cwd()
    if directory.is_absolute() and not directory.is_relative_to(here):
        return
    relative = directory.relative_to(here) if directory.is_absolute() else directory
    for script in scripts:
        yield from (parent / relative for parent in script.absolute().parents if (parent / relative).is_dir())
