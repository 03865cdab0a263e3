"""`fivefold completion SHELL`: a script with every subcommand, option and configuration key.

The shell completes alone. Libraries such as argcomplete start Python at every TAB. Generators from argparse such as shtab do
not complete keys: here they are completed to `key=` and then to their values.
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
    """A configuration key, and its values if they are a fixed list."""

    name: str
    values: tuple[str, ...] = ()


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script for one of SHELLS; subcommands of the parser with an argument `overrides` take keys."""
    assert shell in SHELLS, shell
    commands = _commands(parser)
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands)


def keys() -> list[Key]:
    """Return every key that has a value, in the order of the schema."""
    return list(_keys(RunConfig, ""))


def _keys(part: type[Any], start: str) -> Iterator[Key]:
    for name, hint in typing.get_type_hints(part, include_extras=True).items():
        inner = [each for each in _types(hint) if dataclasses.is_dataclass(each)]
        if inner:
            yield from _keys(typing.cast(type[Any], inner[0]), f"{start}{name}.")
        else:
            yield Key(f"{start}{name}", tuple(dict.fromkeys(_values(hint))))


def _types(hint: Any) -> list[Any]:
    """Return the types of a union, or the one type, without their annotations."""
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
    """Values of the subcommand's positional arguments, if they are a fixed list."""
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


# --- bash ---------------------------------------------------------------------------------------------------------------

_BASH = r"""# Completion of fivefold for bash: eval "$(fivefold completion bash)"
_fivefold_files() {{
    local IFS=$'\n'
    COMPREPLY+=($(compgen -f -- "$1"))
}}
_fivefold() {{
    local line="${{COMP_LINE:0:$COMP_POINT}}" words cur previous command key values=""
    local options="" arguments="" takes_keys="" IFS=$' \t\n'
    cur="${{line##*[[:space:]]}}"
    read -r -a words <<< "$line"
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


def _bash(commands: list[_Command]) -> str:
    return _BASH.format(
        commands=" ".join(each.name for each in commands),
        cases=_cases(commands),
        option_values=_option_values(commands, 'COMPREPLY=($(compgen -W "{}" -- "$cur"))', '_fivefold_files "$cur"'),
        key_values=_key_values(),
        keys=_all_keys(),
    )


def _cases(commands: list[_Command]) -> str:
    """Return the shell cases for the arguments of each subcommand."""
    lines = []
    for each in commands:
        names = " ".join(name for option in each.options for name in option.names)
        own = f'options="{names}" arguments="{" ".join(each.arguments)}" takes_keys="{"yes" if each.takes_keys else ""}"'
        lines.append(f"        {each.name}) {own} ;;")
    return "\n".join(lines)


def _option_values(commands: list[_Command], words: str, files: str) -> str:
    """Return the shell cases for options with a value: one of some words, or a file."""
    lines = []
    for each in commands:
        for option in each.options:
            if option.takes_value:
                pattern = "|".join(f'"{each.name} {name}"' for name in option.names)
                reply = words.format(" ".join(option.values)) if option.values else files
                lines.append(f"        {pattern}) {reply}; return ;;")
    return "\n".join(lines)


def _key_values() -> str:
    return "\n".join(f'            {key.name}) values="{" ".join(key.values)}" ;;' for key in keys() if key.values)


def _all_keys() -> str:
    return " ".join(f"{key.name}=" for key in keys())


# --- zsh ----------------------------------------------------------------------------------------------------------------

_ZSH = r"""#compdef fivefold
# Completion of fivefold for zsh: eval "$(fivefold completion zsh)", or this file as _fivefold in a directory of $fpath
_fivefold() {{
    local command=$words[2] previous=$words[CURRENT-1] options="" arguments="" takes_keys="" values="" key
    if (( CURRENT == 2 )); then
        compadd -- {commands} --help --version
        return
    fi
    case "$command" in
{cases}
    esac
    case "$command $previous" in
{option_values}
    esac
    if [[ "$PREFIX" == *=* && -n "$takes_keys" ]]; then
        key="${{PREFIX%%=*}}"
        case "$key" in
{key_values}
        esac
        compset -P 1 '*='
        if [[ -n "$values" ]]; then compadd -- ${{=values}}; else _files; fi
    elif [[ "$PREFIX" == -* ]]; then
        compadd -- ${{=options}}
    elif [[ -n "$arguments" ]]; then
        compadd -- ${{=arguments}}
    else
        _files
        [[ -n "$takes_keys" ]] && compadd -S '' -- {keys}
    fi
}}
if [[ "$funcstack[1]" == _fivefold ]]; then
    # The first TAB has loaded this file.
    _fivefold "$@"
else
    (( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit }}
    compdef _fivefold fivefold
fi
"""


def _zsh(commands: list[_Command]) -> str:
    return _ZSH.format(
        commands=" ".join(each.name for each in commands),
        cases=_cases(commands),
        option_values=_option_values(commands, "compadd -- {}", "_files"),
        key_values=_key_values(),
        keys=_all_keys(),
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
    # No files where the values are known.
    counted = "|".join(key.name for key in keys() if key.values).replace(".", "\\.")
    known = _quoted(f'string match -qr "^({counted})=" -- (commandline -ct)')
    lines.append(f"complete -c fivefold -f -n {known}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    # fish has only the escapes \' and \\ inside '...'.
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("%%", "%") + "'"
