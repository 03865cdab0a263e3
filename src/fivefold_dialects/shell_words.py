"""Expand the words of a script: quotes, variables, arithmetic, tests, and commands that only print text. It runs nothing."""

from __future__ import annotations

import ast
import operator
import os.path
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fivefold_dialects.bounds import LONGEST, Work, whole_number
from fivefold_dialects.shell_glob import fits, replaced, trimmed

OPEN = "\x00"
"""Mark before a quoted character, which has lost its special meaning."""
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_SETTING = re.compile(r"[+~]{0,2}[A-Za-z_@][\w.@/-]*=.*", re.DOTALL)
_ARGUMENTS = ('"$@"', "$@", '"${@}"', "${@}", "$*", '"$*"')
_NAME = re.compile(r"\$\{([A-Za-z_]\w*|\d+)\}")
_LONGEST_EXPRESSION = 2000
_SILENCED = ("--", "2>&1", ">/dev/null", "&>/dev/null", ">", "&>", "/dev/null")
"""Words of a `cd` command that are not the directory."""


def _quotient(left: int, right: int) -> int:
    """Return the quotient rounded towards zero, as in C."""
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


_OPERATORS: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: _quotient,
    ast.Mod: lambda left, right: left - right * _quotient(left, right),
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip


@dataclass
class Script:
    """Variables, arrays, files and commands of a script, as far as reading it shows them."""

    variables: dict[str, str]
    arrays: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Files that the script writes from heredocs: name -> text."""
    commands: list[list[str]] = field(default_factory=list)
    skipped: list[list[str]] = field(default_factory=list)
    """Commands of branches that do not run with these variables."""
    open: set[str] = field(default_factory=set)
    """Names whose values only running the script would show; other names without a value are empty."""
    exported: set[str] = field(default_factory=set)
    arguments: list[str] | None = None
    """Arguments from the calling script; None if they are not known."""
    functions: dict[str, Any] = field(default_factory=dict)
    """Functions that were not called yet -> their statements."""
    sourced: set[str] = field(default_factory=set)
    work: Work = field(default_factory=Work)
    read_file: Callable[[str], str | None] = lambda name: None
    """Function that returns the text of another script; None if that script does not exist."""

    @property
    def command(self) -> list[str]:
        """Return the words with the most settings, of a command or an array, or else the words that start another script."""
        candidates = [*self.commands, *self.arrays.values()]
        words = max(candidates, key=_weight, default=[])
        return words if _weight(words) else max(self.skipped, key=_weight, default=words)

    def state(self) -> tuple[dict[str, str], dict[str, list[str]], set[str]]:
        self.work.spend(len(self.variables) + len(self.open) + sum(map(len, self.arrays.values())))
        return dict(self.variables), {key: list(value) for key, value in self.arrays.items()}, set(self.open)

    def assign(self, name: str, value: str) -> None:
        """Set a variable."""
        self.variables[name] = self.work.value(value, name)

    def assign_array(self, name: str, items: list[str]) -> None:
        """Set an array."""
        self.work.value(" ".join(items), name)
        self.arrays[name] = items

    def restore(self, state: tuple[dict[str, str], dict[str, list[str]], set[str]]) -> None:
        self.variables, self.arrays, self.open = state


def _weight(words: list[str]) -> float:
    named = sum(_SETTING.fullmatch(word) is not None and "." in word.partition("=")[0] for word in words)
    starts = len(words) > 0 and any(word.endswith(".sh") for word in words[:4])
    return named + sum(word.startswith(("--config", "--config_path")) for word in words) + 0.5 * starts


def skip(text: str, i: int) -> int:
    """Return the index after the item that begins at `i`: a quoted text, `$(...)`, `${...}`, an escape, or one letter."""
    letter = text[i]
    if letter == "\\":
        return i + 2
    if letter in "'`":
        end = text.find(letter, i + 1)
        return len(text) if end < 0 else end + 1
    if letter == '"':
        i += 1
        while i < len(text) and text[i] != '"':
            i = i + 1 if text[i] == "'" else skip(text, i)
        return i + 1
    return bracket(text, i + 1) if letter == "$" and text[i + 1 : i + 2] in ("(", "{") else i + 1


def bracket(text: str, i: int) -> int:
    """Return the index after the bracket that closes the bracket at `i`."""
    opening, closing = text[i], {"(": ")", "{": "}"}[text[i]]
    i += 1
    while i < len(text) and text[i] != closing:
        i = bracket(text, i) if text[i] == opening else skip(text, i)
    return i + 1


def parts(text: str, signs: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield (sign before the piece, piece) of a text that is split at these signs outside of quotes and brackets."""
    sign, start, i = "", 0, 0
    while i < len(text):
        mark = next((one for one in signs if text.startswith(one, i)), None)
        if mark is not None and not (mark == "|" and (text.startswith("||", i) or text[i - 1 : i] in ("|", ">"))):
            yield sign, text[start:i].strip()
            sign, i = mark, i + len(mark)
            start = i
        elif text[i] in "([" and text.startswith(("[[", "(("), i):
            closing = "]]" if text[i] == "[" else "))"
            end = text.find(closing, i)
            i = len(text) if end < 0 else end + 2
        else:
            i = skip(text, i)
    yield sign, text[start:].strip()


def split(text: str) -> list[str]:
    """Return the words of a text, split at white space outside of quotes; the quotes are kept."""
    words, start, i = [], 0, 0
    while i < len(text):
        if text[i].isspace():
            if i > start:
                words.append(text[start:i])
            start = i = i + 1
        else:
            i = skip(text, i)
    return [*words, text[start:]] if len(text) > start else words


def words_of(script: Script, statement: str) -> list[str]:
    """Return the expanded words of a statement; an array assignment is one word with OPEN between its elements."""
    script.work.spend(len(statement))
    array = re.match(r"((?:export |declare -a |local |readonly )?)([A-Za-z_]\w*\+?)=\((.*)\)\s*$", statement, re.DOTALL)
    if array:
        return [f"{array[2]}={OPEN}(" + OPEN.join(words_of(script, array[3].replace("\n", " ")))]
    words: list[str] = []
    for raw in split(statement):
        name = re.fullmatch(r"\"?\$\{([A-Za-z_]\w*)\[[@*]\](?:\+\"?\$\{\1\[[@*]\]\}\"?)?\}\"?", raw)
        if name and name[1] in script.arrays:
            script.work.spend(sum(map(len, script.arrays[name[1]])) + len(script.arrays[name[1]]))
            words += script.arrays[name[1]]
            continue
        if raw in _ARGUMENTS:
            script.work.spend(1 + sum(map(len, script.arguments or [])))
            words += script.arguments or []
            continue
        value = expand_word(raw, script)
        is_assignment = ASSIGNMENT.fullmatch(raw) is not None and "." not in raw.partition("=")[0]
        if "$" in raw and not is_assignment and not raw.startswith(('"', "'")) and len(value.split()) > 1:
            # The value of an unquoted variable is split at spaces.
            words += [value] if "=" in raw.partition("$")[0] else [expand_word(word, script) for word in split(value)]
        elif value:
            words.append(value)
    return words


def expand_word(raw: str, script: Script) -> str:
    """Return a word without its quotes, with variables expanded (not within single quotes)."""
    script.work.spend(len(raw))
    text, i = "", 0
    while i < len(raw):
        end = skip(raw, i)
        if raw[i] == "'":
            text += raw[i + 1 : end - 1].replace("$", OPEN + "$")
        elif raw[i] == '"':
            # Within double quotes a backslash escapes only special characters.
            text += expand(re.sub(r'\\(["\\])', r"\1", raw[i + 1 : end - 1]), script, quoted=True)
        else:
            while end < len(raw) and raw[end] not in "'\"":
                end = skip(raw, end)
            text += expand(raw[i:end], script, quoted=False)
        i = end
    return text.replace(OPEN + "$", "$")


def expand(text: str, script: Script, *, quoted: bool, depth: int = 0) -> str:
    """Return a text with its variables, defaults and arithmetic expanded; unknown values stay as they are written."""
    script.work.spend(len(text))
    done, i = "", 0
    while i < len(text):
        if text[i] == "\\" and i + 1 < len(text):
            # `\$VAR` is expanded by a second reading (eval), as in commands that are arrays.
            name = re.match(r"\$(\w+)", text[i + 1 :])
            plain = text[i + 1] if not quoted or text[i + 1] in '$`"\\' else text[i : i + 2]
            done += _value_of(script, name[1]) if name else plain
            i += 1 + (len(name[0]) if name else 1)
            continue
        end = skip(text, i) if text[i] in "$`" else i + 1
        if text.startswith("$((", i):
            inner = expand(text[i + 3 : end - 2], script, quoted=True, depth=depth + 1)
            number = arithmetic(inner, script)
            done += text[i:end] if number is None else str(number)
        elif text.startswith(("$(", "`"), i):
            inner = text[i + 2 : end - 1] if text[i] == "$" else text[i + 1 : end - 1]
            shown = _printed(inner, script) if depth < 20 else None
            done += "$(" + inner + ")" if shown is None else shown
        elif text.startswith("${", i):
            done += _parameter(text[i + 2 : end - 1], script, depth, quoted)
        elif name := re.match(r"\$([A-Za-z_]\w*|[0-9#])", text[i:]):
            done += _value_of(script, name[1])
            end = i + len(name[0])
        else:
            done += text[i]
        i = end
        if len(done) > LONGEST:
            script.work.value(done, text)
    return script.work.value(done, text)


def _parameter(inside: str, script: Script, depth: int, quoted: bool) -> str:
    """Return the value of `${inside}`, or this text itself if the value is unknown."""
    if counted := re.fullmatch(r"#([A-Za-z_]\w*)(\[[@*]\])?", inside):
        things = script.arrays.get(counted[1]) if counted[2] else script.variables.get(counted[1])
        return "${" + inside + "}" if things is None else str(len(things))
    match = re.match(r"([A-Za-z_]\w*|\d+)(\[[^]]*\])?(.*)", inside, re.DOTALL)
    if match is None or depth > 20:
        return "${" + inside + "}"
    name, index, rest = match.groups()
    if index and name in script.arrays:
        return _element(script, name, index[1:-1], inside)
    is_set = name in script.variables
    value = script.variables.get(name, "")
    if operation := re.match(r"(:?)([-=+?])(.*)", rest, re.DOTALL):
        colon, sign, word = operation.groups()
        there = is_set and (value != "" or not colon)
        if name in script.open:
            return "${" + inside + "}"
        # Within double quotes, single quotes are plain letters.
        other = expand(word.replace('"', ""), script, quoted=True, depth=depth + 1) if quoted else expand_word(word, script)
        if sign == "+":
            return other if there else ""
        if sign == "?":
            return value if there else "${" + name + "}"
        if sign == "=" and not there:
            script.assign(name, other)
        return value if there else other
    if not rest:
        if name in script.arrays and not is_set:
            return script.arrays[name][0] if script.arrays[name] else ""
        return _value_of(script, name)
    if not is_set:
        return "${" + inside + "}"
    if rest in (",,", "^^"):
        return value.lower() if rest == ",," else value.upper()
    if cut := re.fullmatch(r":([0-9]{1,9})(?::([0-9]{1,9}))?", rest):
        start = int(cut[1])
        return value[start : start + int(cut[2])] if cut[2] else value[start:]
    if cut := re.match(r"(##?|%%?)(.*)", rest, re.DOTALL):
        return trimmed(value, cut[1], expand(cut[2], script, quoted=True, depth=depth + 1), script.work)
    if swap := re.fullmatch(r"(//?)((?:\\.|[^/\\])+)(?:/(.*))?", rest, re.DOTALL):
        pattern, other = (expand(part or "", script, quoted=True, depth=depth + 1) for part in (swap[2], swap[3]))
        if not pattern.startswith(("#", "%")) and "$" not in pattern:
            return replaced(value, pattern, other, swap[1] == "//", script.work)
    return "${" + inside + "}"


def _element(script: Script, name: str, index: str, inside: str) -> str:
    items = script.arrays[name]
    if index in ("@", "*"):
        return " ".join(items)
    place = arithmetic(expand(index, script, quoted=True), script)
    return "${" + inside + "}" if place is None else items[place] if -len(items) <= place < len(items) else ""


def _value_of(script: Script, name: str) -> str:
    return script.variables[name] if name in script.variables else "${" + name + "}"


def arithmetic(text: str, script: Script) -> int | None:
    """Return the value of a 64-bit whole-number expression; None if a name in it has no known value or it is not valid."""
    if len(text) > _LONGEST_EXPRESSION:
        return None
    if choice := re.fullmatch(r"([^?]+)\?([^:]+):(.+)", text.strip(), re.DOTALL):
        holds = arithmetic(choice[1], script)
        return None if holds is None else arithmetic(choice[2] if holds else choice[3], script)
    plain = re.sub(r"[A-Za-z_]\w*", lambda name: script.variables.get(name[0], name[0]), text.replace("/", "//")).strip()

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return _of_64_bits(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _of_64_bits(_OPERATORS[type(node.op)](value(node.left), value(node.right)))
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return int(_OPERATORS[type(node.ops[0])](value(node.left), value(node.comparators[0])))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        raise ValueError(text)

    try:
        return value(ast.parse(plain, mode="eval").body) if len(plain) <= _LONGEST_EXPRESSION else None
    except (ValueError, SyntaxError, ZeroDivisionError, KeyError, RecursionError, MemoryError):
        # Python's parser raises the last two errors for brackets that are nested too deeply.
        return None


def _of_64_bits(number: int) -> int:
    """Return a number reduced to 64 bits, as a shell stores it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def test(script: Script, condition: str) -> bool | None:
    """Return whether a condition of a script is true; None if reading cannot decide it."""
    return _joined(condition.strip(), lambda piece: _single(script, piece))


def _joined(text: str, holds: Callable[[str], bool | None]) -> bool | None:
    """Return the value of `a && b || c`, from left to right; None if it cannot be decided."""
    result: bool | None = None
    for sign, piece in parts(text, ("&&", "||")):
        # One value decides alone: true for `||`, false for `&&`.
        right, decides = holds(piece), sign == "||"
        if not sign:
            result = right
        elif decides in (result, right):
            result = decides
        else:
            result = None if None in (result, right) else not decides
    return result


def _single(script: Script, condition: str) -> bool | None:
    if condition in ("true", ":", "false"):
        return condition != "false"
    if condition.startswith("! "):
        holds = test(script, condition[2:])
        return None if holds is None else not holds
    if number := re.fullmatch(r"\(\((.*)\)\)", condition, re.DOTALL):
        value = arithmetic(expand(number[1], script, quoted=True), script)
        return None if value is None else value != 0
    opening, *rest = condition.split(None, 1)
    if opening not in ("[[", "[", "test") or not rest:
        return None
    is_double = opening == "[["
    inner = re.sub(r"\s\]\]?$", "", rest[0].rstrip()).rstrip()
    if not is_double:
        inner = inner.replace(" -a ", " && ").replace(" -o ", " || ")
    return _joined(inner, lambda piece: _compared(script, split(piece), is_double))


def _compared(script: Script, raw: list[str], is_double: bool) -> bool | None:
    """Return whether one comparison within brackets is true; a variable that nothing sets is empty, as in a real run."""
    if raw[:1] == ["!"]:
        holds = _compared(script, raw[1:], is_double)
        return None if holds is None else not holds
    known = [without_unset(expand_word(word, script), script) for word in raw]
    if any("${" in word or "$(" in word for word in known):
        return None
    if len(known) == 1:
        return known[0] != ""
    if len(known) == 2 and known[0] in ("-z", "-n"):
        return (known[1] == "") == (known[0] == "-z")
    if len(known) != 3:
        return None
    left, sign, right = known
    if sign in ("=", "==", "!="):
        is_pattern = is_double and not raw[2].startswith(('"', "'"))
        return (fits(left, right, script.work) if is_pattern else left == right) == (sign != "!=")
    one, other = whole_number(left), whole_number(right)
    if sign in ("-eq", "-ne", "-gt", "-ge", "-lt", "-le") and one is not None and other is not None:
        return bool(getattr(operator, sign[1:])(one, other))
    return None


def without_unset(text: str, script: Script) -> str:
    """Return a text with names that nothing sets replaced by ""."""
    return _NAME.sub(lambda name: name[0] if name[1] in script.open else "", text)


def _printed(command: str, script: Script) -> str | None:
    """Return the output of a command that only transforms text; None for any other command."""
    if (place := _entered(command)) is not None:
        directory = expand_word(place, script)
        return None if "$" in directory else os.path.normpath(os.path.join(script.variables.get("PWD", ""), directory))
    text, holds = "", True
    for sign, piece in parts(command, ("&&", "||")):
        if sign and (sign == "&&") != holds:
            continue
        if piece.startswith(("[", "((", "test ")):
            tested = test(script, piece)
            if tested is None:
                return None
            holds = tested
        elif (shown := _piped(piece, script)) is None:
            return None
        else:
            text, holds = text + shown, True
    return text


def _entered(command: str) -> str | None:
    """Return DIRECTORY of `cd DIRECTORY && pwd`; None for any other command."""
    (_, first), *rest = parts(command, ("&&",))
    words = [word for word in split(first) if word not in _SILENCED]
    if [piece.split() for _, piece in rest] not in ([["pwd"]], [["pwd", "-P"]]) or len(words) != 2 or words[0] != "cd":
        return None
    return words[1]


def _piped(command: str, script: Script) -> str | None:
    text: str | None = None
    for _, piece in parts(command, ("|",)):
        words = [word for word in words_of(script, piece) if not re.match(r"\d?&?>", word)]
        if not words or any("${" in word or "$(" in word for word in words):
            return None
        text = _source(words, script) if text is None else _filtered(words, text)
        if text is None:
            return None
    return text


def _source(words: list[str], script: Script) -> str | None:
    name, *rest = words
    if name == "echo":
        return " ".join(word for word in rest if word not in ("-n", "-e"))
    if name == "pwd":
        return script.variables.get("PWD")
    if name == "printf" and len(rest) == 2 and rest[0] in ("%s", "%s\\n"):
        return rest[1]
    if name in ("dirname", "basename") and rest:
        kept = [word for word in rest if word != "--"]
        path = os.path.dirname(kept[0]) or "." if name == "dirname" else os.path.basename(kept[0])
        return path.removesuffix(kept[1]) if len(kept) > 1 else path
    if name == "realpath" or (name == "readlink" and rest[:1] == ["-f"]):
        return os.path.normpath(rest[-1])
    return None


def _filtered(words: list[str], text: str) -> str | None:
    name, *rest = words
    if name == "tr" and len(rest) == 2 and not any(word.startswith("[") for word in rest):
        if rest[0] == "-d":
            return text.translate(dict.fromkeys(map(ord, rest[1])))
        # If a letter occurs twice in the set, its first place counts.
        ordered, last = reversed(list(enumerate(rest[0]))), len(rest[1]) - 1
        return text.translate({ord(letter): rest[1][min(place, last)] for place, letter in ordered}) if rest[1] else None
    if name == "wc" and rest in (["-w"], ["-l"]):
        return str(len(text.split()) if rest == ["-w"] else text.count("\n") + 1)
    if name == "awk" and "{print NF}" in rest:
        separators = [word[2:] for word in rest if word.startswith("-F")]
        return str(len(text.split(separators[0] or " ") if separators else text.split()))
    return text.strip() if name == "xargs" and not rest else None
