"""Read a launch script, without running it, to get the words of the command that starts training.

Supported: assignments, `${VAR:-default}` and similar forms, `$((arithmetic))`, arrays, quotes, line continuations, `if`,
`case` and `&&` with plain tests, functions, sourced scripts, files that the script writes from heredocs, `eval` and
`bash -c` of a text, and commands that only transform text (`dirname`, `echo | tr`). A variable that nothing sets is empty in
a test, as in a real run. A value that only running would show (`$(command)`, arguments of the script, a variable set in a
loop or after an unknown test) is open: it stays `${NAME}`, and a setting that needs it is an error that names `--env`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from fivefold_dialects.bounds import Work, whole_number
from fivefold_dialects.shell_glob import fits
from fivefold_dialects.shell_words import (
    ASSIGNMENT,
    OPEN,
    Script,
    expand,
    expand_word,
    parts,
    skip,
    split,
    test,
    without_unset,
    words_of,
)

_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_SHELLS = ("bash", "sh", "/bin/bash", "/bin/sh", "zsh")
_DEEP = 20
"""Most levels of nested functions and texts."""


def read_script(
    text: str,
    environment: Mapping[str, str],
    arguments: Sequence[str] | None = None,
    read_file: Callable[[str], str | None] = lambda name: None,
    name: str = "",
    work: Work | None = None,
) -> Script:
    """Return the variables and commands of a bash script. `environment` has its variables, `read_file` returns the text of
    scripts that it sources, `name` is its `$0`. Raise TooMuchError if reading takes more than `work` has left."""
    script = Script(dict(environment), read_file=read_file, work=work or Work())
    script.work.spend(len(text))
    script.exported.update(environment)
    if name:
        script.variables.update({"0": name, "BASH_SOURCE": name})
    _hand_over(script, arguments)
    _read_block(script, _Lines(text), True)
    for body in [*script.functions.values()]:
        # These functions are not called by name but may run: `trap main EXIT`, `"$COMMAND"`.
        _read_block(script, body, True)
    return script


def _hand_over(script: Script, arguments: Sequence[str] | None) -> None:
    for name in [name for name in script.variables if name.isdigit() and name != "0"]:
        del script.variables[name]
    script.arguments = None if arguments is None else list(arguments)
    script.variables["#"] = str(len(arguments or ()))
    script.variables.update({str(place): word for place, word in enumerate(arguments or (), 1)})


class _Lines:
    """Statements of a script, with the heredocs taken out of the text."""

    def __init__(self, text: str) -> None:
        self.heredocs: list[str] = []
        self.statements = list(_statements(self._without_heredocs(text)))
        self.place = 0

    def insert(self, text: str) -> None:
        """Put a text before the statements that were not read yet, if it is not empty."""
        if text.strip():
            self.statements.insert(self.place, text.strip())

    def body(self) -> _Lines:
        """Return and remove the statements up to the bracket that closes a function."""
        depth, start = 1, self.place
        for statement in self:
            depth += len(re.findall(r"(?:^|\s)\{$", statement)) + statement.startswith("{ ")
            if statement == "}" or statement.startswith(("} ", "}\t")):
                depth -= 1
            if depth == 0:
                break
        block = _Lines("")
        block.heredocs, block.statements = self.heredocs, self.statements[start : max(start, self.place - 1)]
        return block

    def _without_heredocs(self, text: str) -> str:
        kept: list[str] = []
        lines = iter(text.splitlines())
        for line in lines:
            match = _HEREDOC.search(line) if not line.lstrip().startswith("#") else None
            if match and "<<<" not in line:
                body = []
                for inner in lines:
                    if inner.strip() == match[2]:
                        break
                    body.append(inner)
                self.heredocs.append(("" if match[1] else "$") + "\n".join(body) + "\n")
                line = f"{line[: match.start()]} <<{len(self.heredocs) - 1} {line[match.end() :]}"
            kept.append(line)
        return "\n".join(kept)

    def __iter__(self) -> Iterator[str]:
        while self.place < len(self.statements):
            self.place += 1
            yield self.statements[self.place - 1]


def _statements(text: str) -> Iterator[str]:
    """Yield statements: split at line ends and `;`, not within quotes, parentheses or after a backslash; `;;` is its own."""
    # Without the lookbehind, the search would start at each of many spaces in a row, which is slow.
    text = re.sub(r"(?<![ \t])[ \t]*\\[ \t]*\r?\n[ \t]*", " ", text)
    piece, depth, i = "", 0, 0
    while i < len(text):
        letter = text[i]
        if letter == "#" and (not piece or piece[-1] in " \t\n(;"):
            while i < len(text) and text[i] != "\n":
                i += 1
            continue
        if letter in "\\'\"`$":
            end = skip(text, i)
            piece += text[i:end]
            i = end
            continue
        depth = depth + 1 if letter == "(" else max(0, depth - 1) if letter == ")" else depth
        is_end = text.startswith(";;", i) and depth == 0
        if letter in "\n;" and depth == 0:
            if piece.strip():
                yield piece.strip()
            piece = ""
            if is_end:
                yield ";;"
                i += 1
        else:
            piece += letter
        i += 1
    if piece.strip():
        yield piece.strip()


def _read_block(script: Script, lines: _Lines, known: bool, ends: tuple[str, ...] = ()) -> str:
    """Read statements up to one of `ends` and return it; names that they set stay open unless they are `known` to run."""
    for statement in lines:
        # The second term is the cost of inserting into the list below.
        script.work.spend(len(statement) + len(lines.statements) // 100)
        first, _, rest = statement.partition(" ")
        if first in ends:
            lines.insert(rest if first == "else" else "")
            return statement
        if first in ("then", "do", "{", "}", "("):
            lines.insert(rest if first != "}" else "")
        elif first == "if":
            _read_if(script, lines, known, rest)
        elif first == "for":
            _read_for(script, lines, known, rest)
        elif first in ("while", "until"):
            holds = test(script, rest.partition("; do")[0])
            is_skipped = holds is (first == "until")
            _skip(script, lines, ("done",)) if is_skipped else _read_block(script, lines, False, ("done",))
        elif first == "case":
            _read_case(script, lines, known, rest)
        elif named := re.match(
            r"(?:function\s+([\w-]+)\s*(?:\(\))?|(\w[\w-]*)\s*\(\))\s*(\{?)\s*(.*)", statement, re.DOTALL
        ):
            _read_function(script, lines, named)
        else:
            _read_statement(script, lines, statement, known)
    return ""


def _read_function(script: Script, lines: _Lines, named: re.Match[str]) -> None:
    inner, following = named[4].strip(), lines.statements[lines.place : lines.place + 1]
    if not inner and not named[3] and following and following[0].startswith("{"):
        lines.place += 1
        inner = following[0][1:]
    lines.insert(inner)
    script.functions[named[1] or named[2]] = lines.body()


def _call(script: Script, name: str, arguments: list[str], known: bool) -> None:
    body, before = script.functions[name], (script.arguments, dict(script.variables))
    body.place = 0
    del script.functions[name]
    _hand_over(script, arguments)
    _read_block(script, body, known)
    _hand_over(script, before[0])
    script.variables.update({key: value for key, value in before[1].items() if key.isdigit() or key == "#"})


def _skip(script: Script, lines: _Lines, ends: tuple[str, ...]) -> str:
    """Read a branch that does not run, keep its commands separately, and return its end word."""
    state, count, functions = script.state(), len(script.commands), dict(script.functions)
    end = _read_block(script, lines, False, ends)
    assigned = script.open - state[2]
    script.restore(state)
    # Names that only this branch sets are empty.
    script.variables.update(dict.fromkeys(assigned - script.variables.keys(), ""))
    script.functions = functions
    script.skipped += script.commands[count:]
    del script.commands[count:]
    return end


def _read_if(script: Script, lines: _Lines, known: bool, condition: str) -> None:
    done: bool | None = False
    ends = ("elif", "else", "fi")
    while True:
        holds = test(script, condition)
        # True: the branch runs; False: it does not; None: reading cannot decide.
        runs = False if done else holds if done is False else None
        end = _skip(script, lines, ends) if runs is False else _read_block(script, lines, known and runs is True, ends)
        if holds is None and done is False:
            done = None
        elif holds:
            done = True
        if end.startswith("elif"):
            condition = end.removeprefix("elif").strip()
        elif end.startswith("else"):
            condition = "true"
        else:
            return


def _read_for(script: Script, lines: _Lines, known: bool, rest: str) -> None:
    """Read a loop: over a single word its variable has this value; over several words it is open."""
    named = re.match(r"\s*(\w+)(?:\s+in\s+(.*))?", rest.partition("; do")[0], re.DOTALL)
    words = words_of(script, named[2]) if named and named[2] else []
    is_once = len(words) == 1 and "$" not in words[0]
    if named and is_once:
        _assign(script, named[1], words[0], known)
    elif named:
        _assign(script, named[1], "", False)
    _read_block(script, lines, known and is_once, ("done",))


def _read_case(script: Script, lines: _Lines, known: bool, rest: str) -> None:
    subject, inside, first = _in(rest)
    value = expand_word(subject, script) if inside else ""
    value = without_unset(value, script)
    lines.insert(first)
    done: bool | None = False if "$" not in value else None
    for statement in lines:
        if statement.startswith("esac"):
            return
        if not (branch := re.match(r"\(?([^()]*)\)\s*(.*)", statement, re.DOTALL)):
            continue
        lines.insert(branch[2])
        patterns = [expand_word(text.strip(), script) for text in branch[1].split("|")]
        holds = done is False and any(fits(value, pattern, script.work) for pattern in patterns)
        if done is None or holds:
            end = _read_block(script, lines, known and holds, (";;", "esac"))
        else:
            end = _skip(script, lines, (";;", "esac"))
        done = True if holds else done
        if end.startswith("esac"):
            return


def _in(text: str) -> tuple[str, str, str]:
    """Return (SUBJECT, "in", REST) for `SUBJECT in REST`; empty texts if there is no `in`."""
    for word in re.finditer(r"(?<!\S)in(?!\S)", text):
        return text[: word.start()].strip(), "in", text[word.end() :].strip()
    return "", "", ""


def _read_statement(script: Script, lines: _Lines, statement: str, known: bool, depth: int = 0) -> None:
    pieces = list(parts(statement, ("&&", "||")))
    if len(pieces) > 1:
        _read_chain(script, lines, pieces, known)
        return
    # Assignments before a command: a later one can use the values of earlier ones.
    set_before: list[str] = []
    while match := re.match(r"([A-Za-z_]\w*)=(?!\()", statement):
        raw = split(statement)[0]
        _assign(script, match[1], expand_word(raw[match.end() :], script), known)
        set_before.append(match[1])
        statement = statement[len(raw) :].lstrip()
    words = words_of(script, statement)
    if words and words[0] in _DECLARING:
        if words[0] == "export" or "-x" in words:
            script.exported.update(word.partition("=")[0] for word in words[1:])
        words = [word for word in words[1:] if not word.startswith("-")]
    for place, word in enumerate(words):
        match = ASSIGNMENT.fullmatch(word)
        if match is None or ("." in word.partition("=")[0]):
            script.exported.update(set_before)
            _read_command(script, lines, words[place:], known, depth)
            return
        name, append, value = match.groups()
        if value.startswith(OPEN + "("):
            array = value[2:].split(OPEN) if value[2:] else []
            script.assign_array(name, (script.arrays.get(name, []) if append else []) + array)
        else:
            _assign(script, name, (script.variables.get(name, "") if append else "") + value, known)


def _read_chain(script: Script, lines: _Lines, pieces: list[tuple[str, str]], known: bool) -> None:
    """Read `test && command || other`: known tests decide what runs; other commands are assumed to succeed."""
    holds: bool | None = True
    for sign, piece in pieces:
        runs = True if not sign else holds if sign == "&&" else None if holds is None else not holds
        if runs is False:
            continue
        if piece.startswith(("[", "((", "test ", "! ")):
            holds = test(script, piece) if runs else None
        elif sign == "||" and re.match(r"(exit|return|true|:|echo|\{)\b", piece):
            continue
        else:
            _read_statement(script, lines, piece.strip("{} "), known and runs is True)
            holds = holds if runs is None else True


def _read_command(script: Script, lines: _Lines, command: list[str], known: bool, depth: int) -> None:
    first, rest = command[0], command[1:]
    if depth > _DEEP:
        return
    if first == "unset":
        for name in rest:
            script.variables.pop(name, None)
        return
    if first == "shift" and script.arguments is not None:
        _hand_over(script, script.arguments[max(0, (whole_number(rest[0]) if rest else None) or 1) :])
        return
    if first in script.functions:
        _call(script, first, rest, known)
        return
    if first in ("source", ".") and rest:
        if rest[0] not in script.sourced and (text := script.read_file(rest[0])) is not None:
            script.sourced.add(rest[0])
            _read_block(script, _Lines(text), known)
        return
    if first == "eval" and len(rest) == 1:
        _read_statement(script, lines, rest[0], known, depth + 1)
        return
    shell = next((place for place, word in enumerate(command) if word in _SHELLS), None)
    if shell is not None and len(command) > shell + 2 and re.fullmatch(r"-\w*c", command[shell + 1]):
        _read_block(script, _Lines(command[shell + 2]), known)
        return
    places = (whole_number(word[2:]) for word in command if word.startswith("<<"))
    if (number := next((place for place in places if place in range(len(lines.heredocs))), None)) is not None:
        written = next((command[i + 1] for i, word in enumerate(command[:-1]) if word in (">", ">|")), None)
        written = written or next((word[1:] for word in command if word.startswith(">") and len(word) > 1), None)
        body = lines.heredocs[number]
        text = expand(body[1:], script, quoted=True) if body.startswith("$") else body
        if written is not None:
            script.files[written] = script.work.value(text, written)
        elif shell is not None:
            _read_block(script, _Lines(text), known)
    script.commands.append(command)


def _assign(script: Script, name: str, value: str, known: bool) -> None:
    """Assign a value to a name; the name becomes open if it is not `known` whether the assignment runs."""
    if known:
        script.assign(name, value)
        script.open.discard(name)
    else:
        script.variables.pop(name, None)
        script.open.add(name)
