"""`make check`: words that an engineer who learned English as a second language stumbles over, in docstrings, comments,
messages, pages and the names of tests, which are sentences and have a longest length, as the last commit's subject has.

Each row of WORDS names what to write instead. Of YAML, shell, JavaScript and build files every line is read. Generated pages
of keys are not.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
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
    r"behind": "after, in the background",
    r"beside": "next to, alongside, with",
    r"go(?:es|ing)? on|went on|gone on": "continues, resumes",
    r"newest": "the latest",
    r"planted": "injected, fault injection",
}
"""Pattern -> what to write instead."""
CODE_WORDS = {
    r"is told|are told": "is passed, receives",
    r"asks for|asked for|(?:is|are) asked(?! to)": "requests, requested, needs",
}
"""Words that describe people, and not code: not for tests, in which commands, models and servers do answer."""
EMPTY_NAMES = {"found", "own", "said", "each"}
"""Names of locals and parameters that do not say what they hold."""
LONGEST_NAME = 80
"""Letters of a test's name."""
LONGEST_SUBJECT = 72
"""Letters of a commit's subject."""
SHORTEST_MESSAGE = 3
"""Words of a text in the source that count as a message."""
LEFT_OUT = ("docs/configuration.md", "docs/metrics.md", "docs/api.md")
BANNER = re.compile(r"\s*(#|//|/\*) ?[-=*]{3}")
PLACES = ("src", "examples", "benchmarks", "docs", "docker", "tests", ".github", ".ci")
SUFFIXES = (".yaml", ".yml", ".sh", ".js", ".css", ".html")
FILES = ("Makefile", "mkdocs.yml", ".ci/run")


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstrings, comments, messages and names of tests of a Python file, of a page outside of code, or of
    every line of another file."""
    source = path.read_text()
    if path.suffix not in (".py", ".md"):
        yield from enumerate(source.splitlines(), 1)
        return
    if path.suffix == ".md":
        in_code = False
        for number, line in enumerate(source.splitlines(), 1):
            in_code ^= line.startswith("```")
            if not in_code and not line.startswith("    "):
                yield number, re.sub(r"`[^`]*`|\]\([^)\s]*\)", "", line)
        return
    tree = ast.parse(source)
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.lineno, node.name.replace("_", " ")
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_message = "src" in path.parts and len(node.value.split()) >= SHORTEST_MESSAGE
            lines = node.value.splitlines() if is_message or id(node) in documented else []
            yield from enumerate(lines, node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def faults(paths: list[Path]) -> Iterator[str]:
    """One line for each word that has a plainer one."""
    every, of_code = (
        {re.compile(rf"\b(?:{words})\b", re.IGNORECASE): plain for words, plain in table.items()}
        for table in (WORDS, CODE_WORDS)
    )
    for path in paths:
        name = str(path.relative_to(ROOT))
        if name.startswith(LEFT_OUT):
            continue
        patterns = every if name.startswith("tests/") else every | of_code
        for number, text in texts(path):
            if name.startswith("src/") and BANNER.match(text):
                yield f"{name}:{number}: a banner: a module that needs parts is several modules"
            for pattern, plain in patterns.items():
                if match := pattern.search(text):
                    yield f"{name}:{number}: {match[0]!r}: write {plain}"


def long_names(paths: list[Path]) -> Iterator[str]:
    """One line for each test whose name is too long."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and len(node.name) > LONGEST_NAME:
                yield f"{path}:{node.lineno}: {node.name}: a test's name has at most {LONGEST_NAME} letters"


def empty_names(paths: list[Path]) -> Iterator[str]:
    """One line for each local and parameter whose name does not say what it holds."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.arg):
                name = node.arg
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            else:
                continue
            if name in EMPTY_NAMES:
                yield f"{path}:{node.lineno}: {name}: name it for what it holds"


def long_subject(root: Path) -> Iterator[str]:
    """One line if the last commit's subject is too long; none for a merge, in a shallow checkout, which may hide a merge's
    parents, and where `root` is no checkout."""
    if _git(root, "rev-parse", "--is-shallow-repository", "--show-toplevel") != ["false", str(root.resolve())]:
        return
    *_, parents, subject = _git(root, "log", "-1", "--format=%P%n%s") or ["", ""]
    if len(parents.split()) < 2 and len(subject) > LONGEST_SUBJECT:
        yield f"{subject!r}: a subject has at most {LONGEST_SUBJECT} letters, got {len(subject)}: `git commit --amend`"


def _git(root: Path, *words: str) -> list[str]:
    """Lines that git prints; none if it fails or is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, errors="replace")
    except OSError:
        return []
    return [] if done.returncode else done.stdout.splitlines()


def main() -> int:
    tests = sorted((ROOT / "tests").rglob("*.py"))
    directories = [path for name in ("src", "examples", "benchmarks") for path in sorted((ROOT / name).rglob("*.py"))]
    pages = [path for name in ("docs", "examples", "benchmarks") for path in sorted((ROOT / name).rglob("*.md"))]
    pages += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    files = [ROOT / name for name in FILES]
    files += [path for name in PLACES for path in sorted((ROOT / name).rglob("*")) if path.suffix in SUFFIXES]
    read = [*directories, *pages, *files, *(path for path in tests if path != Path(__file__).resolve())]
    problems = [
        *faults(read),
        *long_names(tests),
        *empty_names([*directories, *tests, *sorted((ROOT / "docs").rglob("*.py"))]),
        *long_subject(ROOT),
    ]
    print("\n".join(problems) or "plain English: no word of the list")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
