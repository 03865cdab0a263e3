"""Compiles and renders chat templates in a process of its own, whose time and memory are limited: they come from others.

It uses the sandbox and the names of transformers. A template of one line can make a text of gigabytes, or a list that prints
as one, while it is compiled too; only the system can bound that.
"""

from __future__ import annotations

import json
import pickle
import resource
import signal
import subprocess
import sys
import weakref
from datetime import datetime
from functools import lru_cache
from typing import IO, Any

from fivefold.errors import first_line

MOST_STEPS, MOST_SIZE = 200_000, 100_000
"""Limits per conversation: bodies of loops and macros that a chat template runs, and the size of a product in it."""
MOST_SECONDS, MOST_MEMORY, MOST_TEXT = 5, 2**30, 2**26
"""Limits per conversation: seconds of computation, bytes of the process, and letters that the template writes."""


class BoundedTemplate:
    """A compiled chat template; its process ends with this object. Raises ValueError for a template that is not valid."""

    def __init__(self, text: str, seconds: float = MOST_SECONDS) -> None:
        self._text, self._seconds, self._process = text, seconds, _start()
        self._end = weakref.finalize(self, _end, self._process)
        self._ask(None)

    def render(self, **variables: Any) -> str:
        """Return the text of a conversation; raises ValueError if the template raises, or exceeds a limit."""
        return self._ask(variables)

    def _ask(self, variables: dict[str, Any] | None) -> str:
        if not self._end.alive:
            self._process = _start()
            self._end = weakref.finalize(self, _end, self._process)
        assert self._process.stdin is not None and self._process.stdout is not None
        request = pickle.dumps((self._text, self._seconds, variables))
        try:
            self._process.stdin.write(request)
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer:
            code = self._process.wait()
            self._end()
            if code == -signal.SIGPROF:
                raise ValueError(f"it takes more than {self._seconds:g} s for one conversation")
            raise ValueError(f"it ends the process that renders it: exit code {code}")
        text, fault = json.loads(answer)
        if fault is not None:
            raise ValueError(fault)
        return str(text)


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fivefold.data.bounded_template"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer requests until there are no more; runs in the process of a template."""
    # Ctrl-C reaches this process too, which ends with its caller.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The system ends the process where its time is used up: no handler of Python runs within a filter of a template.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        try:
            source, seconds, variables = pickle.load(requests)  # noqa: S301 - of the process that started this one
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = _answer(source, variables)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(answer + b"\n")
        answers.flush()


def _answer(source: str, variables: dict[str, Any] | None) -> bytes:
    """Return the text of a conversation, empty without variables, and what is wrong with it or the template, as JSON."""
    import jinja2

    try:
        template: Any = _compile(source)
        text = ""
        if variables is not None:
            template.environment.steps = 0
            text = template.render(**variables)
        if len(text) <= MOST_TEXT:
            return json.dumps([text, None]).encode()
        fault = f"it writes more than {MOST_TEXT // 2**20} Mi letters for one conversation"
    except MemoryError:
        fault = f"it takes more than {MOST_MEMORY // 2**30} GiB for one conversation"
    except (
        jinja2.TemplateError,
        TypeError,
        ValueError,
        ArithmeticError,
        LookupError,
        AttributeError,
        RecursionError,
    ) as error:
        fault = first_line(error)
    return json.dumps(["", fault]).encode()


@lru_cache(1)
def _compile(text: str) -> Any:
    """Compile a chat template in the sandbox and with the names that transformers uses."""
    import jinja2
    from jinja2.ext import loopcontrols

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = _sandbox()(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_block()])
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": raise_exception,
        "range": environment.counted_range,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return environment.from_string(text)


def _sandbox() -> Any:
    """Return the sandbox class of transformers with limits on loops and products, whose errors name what is too large."""
    import jinja2
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Bounded(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["*", "**"])
        steps = 0
        """Number of bodies of loops and macros that the rendering in progress has run."""

        def step(self, count: int = 1) -> bool:
            self.steps += count
            if self.steps > MOST_STEPS:
                raise jinja2.TemplateError(f"it runs more than {MOST_STEPS} loops and macros for one conversation")
            return True

        def counted_range(self, *ends: int) -> range:
            numbers = range(*ends)
            self.step(len(numbers))
            return numbers

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sizes = [len(side) if isinstance(side, (str, list, tuple)) else abs(side) for side in (left, right)]
            if max(sizes) > MOST_STEPS if operator == "**" else sizes[0] * sizes[1] > MOST_SIZE:
                raise jinja2.TemplateError(f"{operator} makes a value that is too large")
            return super().call_binop(context, operator, left, right)

        def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
            tree = super()._parse(source, name, filename)
            node: Any
            for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
                count = nodes.Call(nodes.EnvironmentAttribute("step"), [], [], None, None).set_lineno(node.lineno)
                node.body.insert(0, nodes.ExprStmt(count).set_lineno(node.lineno))
                if getattr(node, "test", None) is not None:
                    node.test = nodes.And(count, node.test).set_lineno(node.lineno)
            return tree

    return Bounded


def _generation_block() -> Any:
    """Return the extension for `{% generation %}`, which marks the assistant's part and writes nothing itself."""
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - jinja2's own spelling

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)
