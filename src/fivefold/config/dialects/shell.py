"""A launch script -> the words of the command that starts training. The script is read, never run.

Understood: assignments, `${VAR:-default}` and its kin, `$((arithmetic))`, arrays, quotes, line continuations, `if` with
plain tests, files that the script writes from heredocs. What only running could tell (`$(command)`, arguments of the script,
what a loop or an unknown test leaves) stands open: it stays `${NAME}`, and who asks for its value is told to give it.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_SETTING = re.compile(r"[+~]{0,2}[A-Za-z_@][\w.@/-]*=.*", re.DOTALL)
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_OPEN = "\x00"
"""Stands before a quoted character that is not special any more."""
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_ARITHMETIC = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


@dataclass
class Script:
    """What a script says, as far as reading tells."""

    variables: dict[str, str]
    arrays: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Files that it writes from heredocs: name -> text."""
    commands: list[list[str]] = field(default_factory=list)

    @property
    def command(self) -> list[str]:
        """The words with most settings: of a command, or of an array that the script runs."""
        candidates = [*self.commands, *self.arrays.values()]
        return max(candidates, key=_settings_in, default=[])


def read_script(text: str, environment: Mapping[str, str]) -> Script:
    """Read a bash script; `environment` has the variables that it finds set."""
    script = Script(dict(environment))
    lines = _Lines(text)
    _read_block(script, lines, True)
    return script


class _Lines:
    """The statements of a script, with heredocs taken out of the text."""

    def __init__(self, text: str) -> None:
        self.heredocs: list[str] = []
        self.statements = list(_statements(self._without_heredocs(text)))
        self.place = 0

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
    """Statements as text: cut at line ends and `;`, not within quotes, parentheses or after a backslash."""
    text = re.sub(r"[ \t]*\\[ \t]*\r?\n[ \t]*", " ", text)
    piece, quote, depth, i = "", "", 0, 0
    while i < len(text):
        letter = text[i]
        if letter == "\\" and quote != "'" and i + 1 < len(text):
            piece += text[i : i + 2]
            i += 2
            continue
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "#" and (not piece or piece[-1] in " \t\n(;"):
            while i < len(text) and text[i] != "\n":
                i += 1
            continue
        elif letter in "({":
            depth += letter == "(" or text[i - 1] == "$"
        elif letter in ")}":
            depth = max(0, depth - (letter == ")" or (depth > 0 and "${" in piece)))
        if letter in "\n;" and not quote and depth == 0:
            if piece.strip():
                yield piece.strip()
            piece = ""
        else:
            piece += letter
        i += 1
    if piece.strip():
        yield piece.strip()


def _read_block(script: Script, lines: _Lines, known: bool, ends: tuple[str, ...] = ()) -> str:
    """Read statements up to one of `ends`, which is returned; where it is not `known` whether they run, names stay open."""
    for statement in lines:
        first, _, rest = statement.partition(" ")
        if first in ends:
            if rest.strip() and first in ("then", "else", "do"):
                lines.statements.insert(lines.place, rest.strip())
            return statement
        if first in ("then", "do"):
            if rest.strip():
                lines.statements.insert(lines.place, rest.strip())
        elif first == "if":
            _read_if(script, lines, known, rest)
        elif first in ("for", "while", "until"):
            if first == "for" and (name := re.match(r"\s*(\w+)", rest)):
                script.variables.pop(name[1], None)
            _read_block(script, lines, False, ("done",))
        elif first == "case":
            _read_block(script, lines, False, ("esac",))
        elif re.match(r"(function\s+\w+|\w[\w-]*\s*\(\))", statement):
            if not statement.rstrip().endswith("}"):
                _read_block(script, lines, known, ("}",))
        else:
            _read_statement(script, lines, statement, known)
    return ""


def _read_if(script: Script, lines: _Lines, known: bool, condition: str) -> None:
    done: bool | None = False
    while True:
        holds = _test(script, condition)
        # The branch runs, does not, or nobody can tell.
        runs = False if done else holds if done is False else None
        before = (dict(script.variables), {key: list(value) for key, value in script.arrays.items()}, len(script.commands))
        end = _read_block(script, lines, known and runs is True, ("elif", "else", "fi"))
        if runs is False:
            script.variables, script.arrays = before[0], before[1]
            del script.commands[before[2] :]
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


def _read_statement(script: Script, lines: _Lines, statement: str, known: bool) -> None:
    # Each assignment sees the ones before it.
    while match := re.match(r"([A-Za-z_]\w*)=(?!\()", statement):
        raw = _split(statement)[0]
        _assign(script, match[1], _expand_word(raw[match.end() :], script), known)
        statement = statement[len(raw) :].lstrip()
    words = _words(script, statement)
    if words and words[0] in _DECLARING:
        words = [word for word in words[1:] if not word.startswith("-")]
    for place, word in enumerate(words):
        match = _ASSIGNMENT.fullmatch(word)
        if match is None or ("." in word.partition("=")[0]):
            command = words[place:]
            break
        name, append, value = match.groups()
        if value.startswith(_OPEN + "("):
            array = value[2:].split(_OPEN) if value[2:] else []
            script.arrays[name] = (script.arrays.get(name, []) if append else []) + array
        else:
            _assign(script, name, (script.variables.get(name, "") if append else "") + value, known)
    else:
        return
    if (number := next((word[2:] for word in command if word.startswith("<<") and word[2:].isdigit()), None)) is not None:
        name = next((command[i + 1] for i, word in enumerate(command[:-1]) if word in (">", ">|")), None)
        name = name or next((word[1:] for word in command if word.startswith(">") and len(word) > 1), None)
        body = lines.heredocs[int(number)]
        if name is not None:
            script.files[name] = expand(body[1:], script, quoted=True) if body.startswith("$") else body
    script.commands.append(command)


def _assign(script: Script, name: str, value: str, known: bool) -> None:
    """Where nobody can tell whether this runs, the name stands open."""
    if known:
        script.variables[name] = value
    else:
        script.variables.pop(name, None)


def _words(script: Script, statement: str) -> list[str]:
    """The words of a statement, expanded; an array assignment keeps its elements apart."""
    array = re.match(r"((?:export |declare -a |local |readonly )?)([A-Za-z_]\w*\+?)=\((.*)\)\s*$", statement, re.DOTALL)
    if array:
        return [f"{array[2]}={_OPEN}(" + _OPEN.join(_words(script, array[3].replace("\n", " ")))]
    words: list[str] = []
    for raw in _split(statement):
        name = re.fullmatch(r"\"?\$\{([A-Za-z_]\w*)\[[@*]\]\}\"?", raw)
        if name and name[1] in script.arrays:
            words += script.arrays[name[1]]
            continue
        if raw in ('"$@"', "$@", '"${@}"', "$*"):
            continue
        found = _expand_word(raw, script)
        is_assignment = _ASSIGNMENT.fullmatch(raw) is not None and "." not in raw.partition("=")[0]
        if "$" in raw and not is_assignment and not raw.startswith(('"', "'")) and len(found.split()) > 1:
            # An unquoted variable is split at spaces.
            words += [_expand_word(each, script) for each in _split(found)] if "=" not in raw.partition("$")[0] else [found]
        elif found:
            words.append(found)
    return words


def _split(text: str) -> list[str]:
    """Words at white space, quotes kept."""
    words, word, quote, depth, i = [], "", "", 0, 0
    while i < len(text):
        letter = text[i]
        if letter == "\\" and quote != "'" and i + 1 < len(text):
            word += text[i : i + 2]
            i += 2
            continue
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "({" and (depth or text[i - 1 : i] == "$"):
            depth += 1
        elif letter in ")}" and depth:
            depth -= 1
        if letter.isspace() and not quote and not depth:
            if word:
                words.append(word)
            word = ""
        else:
            word += letter
        i += 1
    return [*words, word] if word else words


def _expand_word(raw: str, script: Script) -> str:
    """A word without its quotes, variables in their place (not within single quotes)."""
    text, i = "", 0
    while i < len(raw):
        letter = raw[i]
        if letter == "'":
            end = raw.find("'", i + 1)
            end = len(raw) if end < 0 else end
            text += raw[i + 1 : end].replace("$", _OPEN + "$")
            i = end + 1
        elif letter == '"':
            end = i + 1
            while end < len(raw) and raw[end] != '"':
                end += 2 if raw[end] == "\\" else 1
            # Within double quotes a backslash escapes only what is special there.
            text += expand(re.sub(r'\\(["\\`])', r"\1", raw[i + 1 : end]), script, quoted=True)
            i = end + 1
        else:
            end = i
            depth = 0
            while end < len(raw) and (depth or raw[end] not in "'\""):
                depth += raw[end] in "({" and raw[end - 1 : end] == "$"
                depth -= bool(depth) and raw[end] in ")}"
                end += 2 if raw[end] == "\\" else 1
            text += expand(raw[i:end], script, quoted=False)
            i = end
    return text.replace(_OPEN + "$", "$")


def expand(text: str, script: Script, *, quoted: bool, depth: int = 0) -> str:
    """Variables, defaults and arithmetic in a text; what stands open stays as it is written."""
    found, i = "", 0
    while i < len(text):
        if text[i] == "\\" and i + 1 < len(text):
            # `\$VAR` is for a second reading (eval), which there is where the command is an array.
            found += (
                _value_of(script, name[1])
                if (name := re.match(r"\$(\w+)", text[i + 1 :]))
                else (text[i + 1] if not quoted or text[i + 1] in '$`"\\' else text[i : i + 2])
            )
            i += 1 + (len(name[0]) if name else 1)
            continue
        if text[i] != "$":
            found += text[i]
            i += 1
            continue
        if text.startswith("$((", i):
            end = _closing(text, i + 1)
            inner = expand(text[i + 3 : end - 1], script, quoted=True, depth=depth + 1)
            number = _arithmetic(inner, script)
            found += text[i : end + 1] if number is None else str(number)
            i = end + 1
        elif text.startswith("$(", i):
            end = _closing(text, i + 1)
            found += "$(" + text[i + 2 : end] + ")"
            i = end + 1
        elif text.startswith("${", i):
            end = _closing(text, i + 1)
            found += _parameter(text[i + 2 : end], script, depth)
            i = end + 1
        elif name := re.match(r"\$([A-Za-z_]\w*|\d)", text[i:]):
            found += _value_of(script, name[1])
            i += len(name[0])
        else:
            found += "$"
            i += 1
    return found


def _parameter(inside: str, script: Script, depth: int) -> str:
    """What `${inside}` stands for."""
    match = re.match(r"([A-Za-z_]\w*|\d+)(.*)", inside, re.DOTALL)
    if match is None or depth > 20:
        return "${" + inside + "}"
    name, rest = match.groups()
    is_set = name in script.variables
    value = script.variables.get(name, "")
    if operation := re.match(r"(:?)([-=+?])(.*)", rest, re.DOTALL):
        colon, sign, word = operation.groups()
        there = is_set and (value != "" or not colon)
        other = _expand_word(word, script)
        if sign == "+":
            return other if there else ""
        if sign == "?":
            return value if there else "${" + name + "}"
        if sign == "=" and not there:
            script.variables[name] = other
        return value if there else other
    if not rest:
        if name in script.arrays and not is_set:
            return script.arrays[name][0] if script.arrays[name] else ""
        return _value_of(script, name)
    if not is_set:
        return "${" + inside + "}"
    if rest in (",,", "^^"):
        return value.lower() if rest == ",," else value.upper()
    if cut := re.match(r"(##?|%%?)(.*)", rest, re.DOTALL):
        return _trim(value, cut[1], expand(cut[2], script, quoted=True, depth=depth + 1))
    if swap := re.match(r"//?([^/]+)/?(.*)", rest, re.DOTALL):
        return value.replace(swap[1], swap[2], -1 if rest.startswith("//") else 1)
    return "${" + inside + "}"


def _value_of(script: Script, name: str) -> str:
    return script.variables[name] if name in script.variables else "${" + name + "}"


def _trim(value: str, sign: str, pattern: str) -> str:
    """`${name#pattern}` and its kin, where * stands for anything."""
    made = re.escape(pattern).replace(r"\*", ".*" if len(sign) == 2 else ".*?")
    if sign.startswith("#"):
        return re.sub(f"^{made}", "", value, count=1)
    starts = [i for i in range(len(value) + 1) if re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), value[i:])]
    return value[: (min(starts) if len(sign) == 2 else max(starts))] if starts else value


def _arithmetic(text: str, script: Script) -> int | None:
    """A whole-number expression; None where a name in it stands open."""
    plain = re.sub(r"[A-Za-z_]\w*", lambda name: script.variables.get(name[0], name[0]), text.replace("/", "//"))

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return int(_ARITHMETIC[type(node.op)](value(node.left), value(node.right)))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        raise ValueError(text)

    try:
        return value(ast.parse(plain.strip(), mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError):
        return None


def _test(script: Script, condition: str) -> bool | None:
    """Whether `[ ... ]` holds; None where reading cannot tell."""
    if condition in ("true", ":"):
        return True
    match = re.fullmatch(r"\[\[?\s+(.*?)\s+\]\]?", condition.strip())
    if match is None or re.search(r"\s(&&|\|\||-a|-o)\s", match[1]):
        return None
    words = [_expand_word(word, script) for word in _split(match[1])]
    negated = words[:1] == ["!"]
    words = words[1:] if negated else words
    holds: bool | None = None
    if len(words) == 2 and words[0] in ("-z", "-n"):
        # A variable that is not set anywhere is empty, as it is when the script runs without it.
        empty = words[1] == "" or re.fullmatch(r"\$\{[A-Za-z_]\w*\}", words[1]) is not None
        holds = empty == (words[0] == "-z")
    elif len(words) == 3 and not any("$" in word for word in words):
        left, sign, right = words
        if sign in ("=", "==", "!="):
            holds = (left == right) == (sign != "!=")
        elif sign in ("-eq", "-ne", "-gt", "-ge", "-lt", "-le") and left.isdigit() and right.isdigit():
            holds = bool(getattr(operator, sign[1:])(int(left), int(right)))
    return None if holds is None else holds != negated


def _closing(text: str, start: int) -> int:
    """Place of the bracket that closes the one at `start`."""
    pair = {"(": ")", "{": "}"}[text[start]]
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == text[start]) - (text[i] == pair)
        if depth == 0:
            return i
    return len(text)


def _settings_in(words: list[str]) -> int:
    named = sum(_SETTING.fullmatch(word) is not None and "." in word.partition("=")[0] for word in words)
    return named + sum(word.startswith(("--config", "--config_path")) for word in words)
