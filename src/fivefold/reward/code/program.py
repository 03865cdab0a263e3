"""One program in the process forked for it: opens its files, confines itself and runs the program."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import importlib
import io
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from fivefold.reward.code import remote

_USUAL = (
    "array", "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions",
    "functools", "heapq", "itertools", "json", "math", "numbers", "operator", "queue", "random", "re", "statistics",
    "string", "struct", "textwrap", "time", "typing", "unicodedata",
)  # fmt: skip
"""Modules that programs import often; they are imported before the fork to save time."""
GIVEN = (
    "import bisect, collections, copy, functools, heapq, itertools, math, random, re, string, sys\n"
    "from bisect import *\nfrom collections import *\nfrom functools import *\nfrom heapq import *\n"
    "from itertools import *\nfrom math import gcd, inf, sqrt, ceil, floor\nfrom typing import *\n"
)
"""Names that code sets with functions assume to exist."""


def warm() -> None:
    """Import the modules that programs import."""
    for name in _USUAL:
        importlib.import_module(name)


def run(files: list[int], request: dict[str, Any], lock: Callable[[], None], begun: int) -> None:
    """Run the program in the first of `files` with the next two as its input and output, and end this process.

    This writes a byte into the file `begun` once the process is confined, before the program runs. With a `function`, the
    input is the JSON list of its arguments, and its result is written to the last of the files as JSON. `serves`: tests in
    another process call the program's functions, over the second and the last of the files. `names`: the text is such tests,
    which use these names of the program.
    """
    function, serves, names = request.get("function"), request.get("serves", False), request.get("names")
    source, input_file, output, result = files
    text = _read(source)
    arguments = _read(input_file) if function is not None else ""
    nothing = os.open(os.devnull, os.O_WRONLY)
    # Copy to high numbers first: a file may already have a number that another file needs.
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD, 100) for file in (input_file, output, nothing, result)]
    for number, copy in enumerate(copies):
        os.dup2(copy, number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - open as long as the process is
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    os.environ.clear()
    atexit._clear()
    sys.setrecursionlimit(10_000)
    lock()
    os.write(begun, b"!")
    os.closerange(4, 1 << 16)
    code = 0
    try:
        if serves or names is not None:
            # The pipe between the two processes is not an input of either.
            sys.stdin = io.StringIO()
            space: dict[str, Any] = {"__name__": "solution" if serves else "tests"}
            exec(GIVEN, space)  # noqa: S102
            if serves:
                exec(compile(text, "<program>", "exec"), space)  # noqa: S102
                remote.serve(space)
            else:
                remote.run_tests(text, names or {}, space)
        elif function is None:
            exec(compile(text, "<program>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})  # noqa: S102
        else:
            value = _call(text, function, json.loads(arguments))
            with io.FileIO(3, "w", closefd=False) as file:
                file.write(json.dumps(value, default=_plain).encode())
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        code = 1
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except BaseException:
        code = 1
    os._exit(code & 0xFF)


def _call(text: str, function: str, arguments: list[Any]) -> Any:
    """Return the result of a function of the program, or of a method of its class Solution."""
    space: dict[str, Any] = {"__name__": "program"}
    exec(GIVEN, space)  # noqa: S102
    exec(compile(text, "<program>", "exec"), space)  # noqa: S102
    if function not in space and "Solution" in space:
        return getattr(space["Solution"](), function)(*arguments)
    return space[function](*arguments)


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold, for types that tests may compare."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return sorted(value) if isinstance(value, (set, frozenset)) else list(value)


def _read(file: int) -> str:
    os.lseek(file, 0, os.SEEK_SET)
    with open(file, encoding="utf-8", closefd=False) as text:
        content = text.read()
    os.lseek(file, 0, os.SEEK_SET)
    return content
