"""`make check`: words that an engineer who learned English as a second language stumbles over, in docstrings, comments and pages.
Names of tests, which are sentences, have a longest length.

Each row of WORDS names what to write instead. The dialects' YAML tables and generated pages of keys are not looked at.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORDS = {
    r"anew": "again, from scratch",
    r"nobody|whoever|whomever|somebody": "the component's name: no process, the caller, the user",
    r"(?:can|could)not be had|to be had": "is not supported, is not available",
    r"for ever": "permanently",
    r"comes? apart": "diverges",
    r"behindhand|henceforth|thereof|wherein|whereof|thereby": "a plain word",
    r"is told|are told": "is passed, receives",
}
"""Pattern -> what to write instead."""
LONGEST_NAME = 80
"""Letters of a test's name."""
LEFT_OUT = ("docs/configuration.md", "docs/metrics.md", "docs/api.md")


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstrings and comments of a Python file, or of the lines of a page outside of code blocks."""
    source = path.read_text()
    if path.suffix != ".py":
        in_code = False
        for number, line in enumerate(source.splitlines(), 1):
            in_code ^= line.startswith("```")
            if not in_code and not line.startswith("    "):
                yield number, re.sub(r"`[^`]*`", "", line)
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for offset, line in enumerate(node.value.value.splitlines()):
                yield node.lineno + offset, line
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def faults(paths: list[Path]) -> Iterator[str]:
    """One line for each word that has a plainer one."""
    patterns = {re.compile(rf"\b(?:{words})\b", re.IGNORECASE): plain for words, plain in WORDS.items()}
    for path in paths:
        name = str(path.relative_to(ROOT))
        if name.startswith(LEFT_OUT):
            continue
        for number, text in texts(path):
            for pattern, plain in patterns.items():
                if match := pattern.search(text):
                    yield f"{name}:{number}: {match[0]!r}: write {plain}"


def long_names(paths: list[Path]) -> Iterator[str]:
    """One line for each test whose name is too long."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and len(node.name) > LONGEST_NAME:
                yield f"{path}:{node.lineno}: {node.name}: a test's name has at most {LONGEST_NAME} letters"


def main() -> int:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = [*faults([*sorted((ROOT / "src").rglob("*.py")), *pages]), *long_names(sorted((ROOT / "tests").rglob("*.py")))]
    print("\n".join(found) or "plain English: no word of the list")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
