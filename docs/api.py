"""Writes api.md: the names that `from fivefold import ...` has, with their signatures and docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import fivefold

HEAD = """
    # Python API

    {generated}

    What a program imports is `from fivefold import ...` with the names below; the modules behind them may change from one
    version to the next. Importing `fivefold` takes no torch: each name brings what it needs when it is asked for.

    ```python
    from fivefold import RunConfig, check, train


    def concise(response, ground_truth):  # a reward of your own, in this file
        return float(response.strip().endswith(ground_truth)) - 0.001 * len(response)


    if __name__ == "__main__":
        config = RunConfig.from_yaml("run.yaml", ["trainer.steps=10"])
        print(*check(config).errors, sep="\\n")
        directory = train(config)  # metrics.jsonl, samples.jsonl, checkpoints/
    ```

    **Functions of your own** are not registered: wherever the configuration names `path.py:function`, that function is
    loaded, and `RunConfig.of` takes the function itself: rewards (`reward.functions`), advantages, credit, ratios,
    surrogates, aggregation, KL estimators (`algorithm.*`), weights of old samples. [extending.md](extending.md) has the
    signature of each; what needs a file of ours (a method, a family, an engine, a dialect) has its recipe there too.
"""


def api(generated: str, fields: Callable[[type[Any]], dict[str, str]]) -> str:
    """The page; `fields` gives a class's fields with the strings below them."""
    parts = []
    for name in fivefold.__all__:
        found = getattr(fivefold, name)
        parts.append("\n".join(_class(name, found, fields) if inspect.isclass(found) else _function(name, found, "##")))
    names = re.sub(r"\n{3,}", "\n\n", "\n\n".join(parts)).rstrip()
    return f"{inspect.cleandoc(HEAD).replace('{generated}', generated)}\n\n{names}\n"


def _function(name: str, function: Any, level: str) -> Iterator[str]:
    yield f"{level} `{name}`\n"
    yield f"```python\n{_signature(name, function)}\n```\n"
    yield f"{_text(function)}\n"


def _class(name: str, kind: type[Any], fields: Callable[[type[Any]], dict[str, str]]) -> Iterator[str]:
    yield f"## `{name}`\n"
    yield _text(kind)
    if name == "RunConfig":
        yield "\nIts sections and keys are those of [configuration.md](configuration.md).\n"
    elif dataclasses.is_dataclass(kind):
        explained = fields(kind)
        rows = [
            f"| `{field.name}` | {explained[field.name]} |" for field in dataclasses.fields(kind) if field.name in explained
        ]
        if rows:
            yield "\n| field | |\n|---|---|\n" + "\n".join(rows) + "\n"
    for method, function in vars(kind).items():
        plain = function.__func__ if isinstance(function, classmethod) else function
        if method.startswith("_") or not inspect.isfunction(plain) or not plain.__doc__:
            continue
        yield from _function(f"{name}.{method}", plain, "###")


def _signature(name: str, function: Any) -> str:
    """As it is called: without self, and types as they are written."""
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.name not in ("self", "cls")]
    return name + re.sub(r"'([^']*)'", r"\1", str(signature.replace(parameters=own)))


def _text(documented: Any) -> str:
    return inspect.cleandoc(documented.__doc__)
