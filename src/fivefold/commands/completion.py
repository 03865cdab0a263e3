"""`fivefold completion SHELL`: shtab's script for the subcommands and options, with functions for the configuration's keys.

A key is completed to `key=`, and then to its values or to a file.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import shtab

from fivefold.commands.flags import SHELLS
from fivefold.config import RunConfig
from fivefold.keys.identity import key_of
from fivefold.keys.ranges import OneOf

_PREAMBLE = {
    "bash": r"""
_fivefold_file_or_key() {
    local key="${1%%=*}"
    if [[ "$1" != *=* ]]; then
        compgen -f -- "$1"
        compgen -W "KEYS" -- "$1"
    elif [[ " VALUES" == *" $key="* ]]; then
        compgen -W "VALUES" -- "$1"
    else
        compgen -f -P "$key=" -- "${1#*=}"
    fi
}
_fivefold() {
    local line="${COMP_LINE:0:$COMP_POINT}" COMP_WORDS COMP_CWORD word
    # Bash splits words also at =.
    read -r -a COMP_WORDS <<< "$line"
    [[ "$line" == *[[:space:]] ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    word="${COMP_WORDS[COMP_CWORD]}"
    _shtab_fivefold
    [[ ${#COMPREPLY[@]} == 1 && "${COMPREPLY[0]}" == *= ]] && compopt -o nospace 2>/dev/null
    # It then completes only what follows the = of a word.
    [[ "${COMP_WORDBREAKS:-}" == *=* && "$word" == *=* ]] && COMPREPLY=("${COMPREPLY[@]#*=}")
    return 0
}
""",
    "zsh": r"""
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
_fivefold_file_or_key() {
    local -a values=(VALUES)
    values=(${(M)values:#${PREFIX%%=*}=*})
    if ! compset -P 1 '*='; then
        _files
        compadd -S '' -- KEYS
    elif (( $#values )); then
        compadd -- ${values#*=}
    else
        _files
    fi
}
""",
    "fish": r"""
function _fivefold_file_or_key
    set -l word (commandline -ct)
    set -l parts (string split -m 1 = -- $word)
    set -l values (string match -- "$parts[1]=*" VALUES)
    if not set -q parts[2]
        __fish_complete_path $word
        string join \n KEYS
    else if set -q values[1]
        string join \n $values
    else
        string replace -r '^' "$parts[1]=" (__fish_complete_path $parts[2])
    end
end
""",
}
"""Functions that complete an argument of `train` or `check`: a file, a key, or the value of a key."""
_FILE_OR_KEY = {"bash": "_fivefold_file_or_key", "zsh": "_fivefold_file_or_key", "fish": "(_fivefold_file_or_key)"}
_REPAIRS = {
    "bash": ("-F _shtab_fivefold ", "-F _fivefold "),
    # With the pattern that shtab has for several arguments, zsh completes only the first of them.
    "zsh": (r'"\(\*\)::?', '"*:'),
    "fish": ("", ""),
}
"""Texts of shtab's script and their replacements."""


@dataclass(frozen=True)
class Key:
    """A configuration key, and its values if they are a fixed list."""

    name: str
    values: tuple[str, ...] = ()


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script for one of SHELLS; subcommands of the parser with an argument `overrides` take keys."""
    assert shell in SHELLS, shell
    [subparsers] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for command in subparsers.choices.values():
        takes_keys = any(action.dest == "overrides" for action in command._actions)
        for action in command._actions:
            if action.nargs != 0 and not action.choices:
                is_named = bool(action.option_strings)
                action.complete = _FILE_OR_KEY if takes_keys and not is_named else "file"
    names = " ".join(f"{key.name}=" for key in keys())
    values = " ".join(f"{key.name}={value}" for key in keys() for value in key.values)
    preamble = _PREAMBLE[shell].replace("KEYS", names).replace("VALUES", values)
    return re.sub(*_REPAIRS[shell], shtab.complete(parser, shell, preamble=preamble))


def keys() -> list[Key]:
    """Return every key that has a value, in the order of the schema."""
    return list(_keys(RunConfig, ""))


def _keys(part: type[Any], start: str) -> Iterator[Key]:
    for name, hint in typing.get_type_hints(part, include_extras=True).items():
        inner, key = [kind for kind in _types(hint) if dataclasses.is_dataclass(kind)], f"{start}{key_of(name)}"
        if inner:
            yield from _keys(typing.cast(type[Any], inner[0]), f"{key}.")
        else:
            yield Key(key, tuple(dict.fromkeys(_values(hint))))


def _types(hint: Any) -> list[Any]:
    """Return the types of a union, or the one type, without their annotations."""
    if typing.get_origin(hint) is typing.Annotated:
        return _types(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [one for part in typing.get_args(hint) for one in _types(part)]
    return [hint]


def _values(hint: Any) -> Iterator[str]:
    if typing.get_origin(hint) is typing.Annotated:
        for rule in typing.get_args(hint)[1:]:
            if isinstance(rule, OneOf):
                yield from rule.names
        yield from _values(typing.get_args(hint)[0])
    elif typing.get_origin(hint) in (typing.Union, types.UnionType):
        for part in typing.get_args(hint):
            yield from _values(part)
    elif typing.get_origin(hint) is typing.Literal:
        yield from map(str, typing.get_args(hint))
    elif hint is bool:
        yield from ("true", "false")
    elif hint is types.NoneType:
        yield "null"
