"""`fivefold completion SHELL`: a script with every subcommand, option and configuration key in it.

The shell alone completes: no Python starts at a TAB, which the libraries for it (argcomplete) do each time, and keys are
completed to `key=` and then to their values, which generators from argparse (shtab) do not know.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fivefold.commands.flags import SHELLS
from fivefold.config.ranges import OneOf
from fivefold.config.schema import RunConfig


@dataclass(frozen=True)
class Key:
    """A configuration key, and its values where they can be counted."""

    name: str
    values: tuple[str, ...] = ()


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for one of SHELLS, of a parser whose subcommands with an argument `overrides` take keys."""
    assert shell in SHELLS, shell
    commands = _commands(parser)
    return _fish(commands) if shell == "fish" else _bash(commands, zsh=shell == "zsh")


def keys() -> list[Key]:
    """Every key that has a value, in the order of the schema."""
    return list(_keys(RunConfig, ""))


def _keys(part: type[Any], start: str) -> Iterator[Key]:
    for name, hint in typing.get_type_hints(part, include_extras=True).items():
        inner = [each for each in _types(hint) if dataclasses.is_dataclass(each)]
        if inner:
            yield from _keys(typing.cast(type[Any], inner[0]), f"{start}{name}.")
        else:
            yield Key(f"{start}{name}", tuple(dict.fromkeys(_values(hint))))


def _types(hint: Any) -> list[Any]:
    """The types of a union, or the one type, without their annotations."""
    if typing.get_origin(hint) is typing.Annotated:
        return _types(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [one for each in typing.get_args(hint) for one in _types(each)]
    return [hint]


def _values(hint: Any) -> Iterator[str]:
    if typing.get_origin(hint) is typing.Annotated:
        for rule in typing.get_args(hint)[1:]:
            if isinstance(rule, OneOf):
                yield from rule.names
        yield from _values(typing.get_args(hint)[0])
    elif typing.get_origin(hint) in (typing.Union, types.UnionType):
        for each in typing.get_args(hint):
            yield from _values(each)
    elif typing.get_origin(hint) is typing.Literal:
        yield from map(str, typing.get_args(hint))
    elif hint is bool:
        yield from ("true", "false")
    elif hint is types.NoneType:
        yield "null"


@dataclass(frozen=True)
class _Option:
    names: tuple[str, ...]
    about: str
    takes_value: bool
    values: tuple[str, ...]


@dataclass(frozen=True)
class _Command:
    name: str
    about: str
    options: tuple[_Option, ...]
    arguments: tuple[str, ...]
    """Values of its positional arguments, where they can be counted."""
    takes_keys: bool


def _commands(parser: argparse.ArgumentParser) -> list[_Command]:
    [subparsers] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    about = {action.dest: action.help or "" for action in subparsers._choices_actions}
    return [_command(name, about[name], own) for name, own in subparsers.choices.items()]


def _command(name: str, about: str, parser: argparse.ArgumentParser) -> _Command:
    options: list[_Option] = []
    arguments: list[str] = []
    for action in parser._actions:
        values = tuple(map(str, action.choices or ()))
        if action.option_strings:
            options.append(_Option(tuple(action.option_strings), action.help or "", action.nargs != 0, values))
        else:
            arguments += values
    return _Command(name, about, tuple(options), tuple(arguments), any(each.dest == "overrides" for each in parser._actions))


# --- bash and zsh -------------------------------------------------------------------------------------------------------

_BASH = r"""# Completion of fivefold for {shell}: eval "$(fivefold completion {shell})"
{head}_fivefold_files() {{
    local IFS=$'\n'
    COMPREPLY+=($(compgen -f -- "$1"))
}}
_fivefold() {{
{local}    local line="${{COMP_LINE:0:$COMP_POINT}}" words cur previous command key values=""
    local options="" arguments="" takes_keys="" IFS=$' \t\n'
    cur="${{line##*[[:space:]]}}"
    {split}
    command="${{words[1]:-}}"
    previous="${{words[${{#words[@]}}-1]:-}}"
    [ -n "$cur" ] && previous="${{words[${{#words[@]}}-2]:-}}"
    COMPREPLY=()
    if [ "${{#words[@]}}" -lt 2 ] || {{ [ "${{#words[@]}}" -eq 2 ] && [ -n "$cur" ]; }}; then
        COMPREPLY=($(compgen -W "{commands} --help --version" -- "$cur"))
        return
    fi
    case "$command" in
{cases}
    esac
    case "$command $previous" in
{option_values}
    esac
    if [[ "$cur" == *=* && -n "$takes_keys" ]]; then
        key="${{cur%%=*}}"
        case "$key" in
{key_values}
        esac
        if [ -n "$values" ]; then
            COMPREPLY=($(compgen -W "$values" -- "${{cur#*=}}"))
        else
            _fivefold_files "${{cur#*=}}"
        fi
        # Where = ends a word, the shell completes what is behind it only.
        [[ "${{COMP_WORDBREAKS:-}}" == *=* ]] || COMPREPLY=("${{COMPREPLY[@]/#/$key=}}")
    elif [[ "$cur" == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$cur"))
    elif [ -n "$arguments" ]; then
        COMPREPLY=($(compgen -W "$arguments" -- "$cur"))
    else
        _fivefold_files "$cur"
        if [ -n "$takes_keys" ]; then
            COMPREPLY+=($(compgen -W "{keys}" -- "$cur"))
            compopt -o nospace 2>/dev/null
        fi
    fi
}}
complete -o filenames -F _fivefold fivefold
"""
_ZSH_HEAD = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def _bash(commands: list[_Command], zsh: bool) -> str:
    cases, option_values = [], []
    for each in commands:
        names = " ".join(name for option in each.options for name in option.names)
        own = f'options="{names}" arguments="{" ".join(each.arguments)}" takes_keys="{"yes" if each.takes_keys else ""}"'
        cases.append(f"        {each.name}) {own} ;;")
        for option in each.options:
            pattern = "|".join(f'"{each.name} {name}"' for name in option.names)
            if option.values:
                reply = f'COMPREPLY=($(compgen -W "{" ".join(option.values)}" -- "$cur"))'
                option_values.append(f"        {pattern}) {reply}; return ;;")
            elif option.takes_value:
                option_values.append(f'        {pattern}) _fivefold_files "$cur"; return ;;')
    known = keys()
    key_values = [f'            {key.name}) values="{" ".join(key.values)}" ;;' for key in known if key.values]
    return _BASH.format(
        shell="zsh" if zsh else "bash",
        head=_ZSH_HEAD if zsh else "",
        # Arrays begin at 0, and unquoted expansions are split, as in bash.
        local="    emulate -L ksh\n" if zsh else "",
        split="words=(${=line})" if zsh else 'read -r -a words <<< "$line"',
        commands=" ".join(each.name for each in commands),
        cases="\n".join(cases),
        option_values="\n".join(option_values),
        key_values="\n".join(key_values),
        keys=" ".join(f"{key.name}=" for key in known),
    )


# --- fish ---------------------------------------------------------------------------------------------------------------


def _fish(commands: list[_Command]) -> str:
    lines = ["# Completion of fivefold for fish: fivefold completion fish | source", "complete -c fivefold -e"]
    for each in commands:
        lines.append(f"complete -c fivefold -f -n __fish_use_subcommand -a {each.name} -d {_quoted(each.about)}")
        seen = f"-n '__fish_seen_subcommand_from {each.name}'"
        for option in each.options:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
            values = f" -f -a {_quoted(' '.join(option.values))}" if option.values else ""
            takes = " -r" if option.takes_value else ""
            lines.append(f"complete -c fivefold {seen} {names}{takes}{values} -d {_quoted(option.about)}")
        if each.arguments:
            lines.append(f"complete -c fivefold {seen} -f -a {_quoted(' '.join(each.arguments))}")
    takers = " ".join(each.name for each in commands if each.takes_keys)
    words = [word for key in keys() for word in ([f"{key.name}={value}" for value in key.values] or [f"{key.name}="])]
    lines.append(f"complete -c fivefold -n '__fish_seen_subcommand_from {takers}' -a {_quoted(' '.join(words))}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    # fish knows no escape within '...' but \' and \\.
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("%%", "%") + "'"
