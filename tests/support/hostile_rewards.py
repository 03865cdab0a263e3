"""Reward functions that return what they should not, and answers that built-in rewards might not read. Every case follows from its number, like those of `fuzz.py`.

`benchmarks/attacks.py` takes as many of them as it has time for.
"""

from __future__ import annotations

import math
import random
import time
from pathlib import Path

from fivefold.config.scoring import RewardConfig
from fivefold.reward import forms, rules
from fivefold.reward.cpu_limit import TooLongError, within
from fivefold.reward.pool import RewardPool
from fivefold.types import Prompt, Sample

CODE = '''
import array, collections, decimal, fractions, itertools, os, signal, sys, threading, time
import numpy

class Raises:
    """Whatever is asked of it raises, its text too."""
    def fail(self, *_, **__): raise self.error()
    __float__ = __eq__ = __len__ = __getitem__ = __iter__ = __bool__ = __index__ = __repr__ = __str__ = __hash__ = fail
    def __init__(self, error): self.error = error

class RaisesAtAttributes:
    def __getattribute__(self, name): raise KeyError(name)

class Silent(Exception):
    def __str__(self): raise RuntimeError("no text")
    __repr__ = __str__

class Leaves(Exception):
    def __str__(self): sys.exit(3)

class Endless(Exception):
    def __str__(self):
        while True: pass

class Loud(Exception):
    def __str__(self): return "\\x1b[2J" + "x" * 10_000_000

class Half(Exception):
    def __str__(self): return "\\ud800 half"

class Float:
    def __init__(self, value): self.value = value
    def __float__(self): return self.value() if callable(self.value) else self.value

class Length(list):
    def __len__(self): return 10 ** 12

class Long:
    def __len__(self): return 1
    def __getitem__(self, place): return next(self.values)
    def __init__(self, *values): self.values = iter(values)

class Number(float):
    def __float__(self): return float("nan")
    def __eq__(self, other): raise RuntimeError("no comparison")

class Mapping(dict):
    def get(self, *_): raise RuntimeError("no value")
    __getitem__ = get

class Text(str):
    def __float__(self): return 1.0

def spin():
    while True: pass

def endless():
    while True: yield 1.0

def deep(levels):
    value = []
    for _ in range(levels): value = [value]
    return value

def raises(error):
    raise error

def chain():
    error = ValueError("a")
    error.__cause__ = error
    raise error

def group():
    raise ExceptionGroup("x", [Silent(), ExceptionGroup("y", [Leaves()])])

def ring():
    value = []
    value.append(value)
    return value

async def later(value): return value
async def never():
    while True: await __import__("asyncio").sleep(1)

def threads():
    threading.Thread(target=spin, daemon=True).start()
    return 0.25

VALUES = {
    "0": lambda: 0, "true": lambda: True, "half": lambda: 0.5, "-0.0": lambda: -0.0, "1e37": lambda: 1e37,
    "numpy": lambda: numpy.float32(0.25), "an array": lambda: numpy.array(0.25), "a whole of numpy": lambda: numpy.int64(3),
    "decimal": lambda: decimal.Decimal("0.25"), "fraction": lambda: fractions.Fraction(1, 4), "an object": lambda: Float(0.25),
    "threads": threads,
    "none": lambda: None, "nan": lambda: float("nan"), "inf": lambda: float("inf"), "-inf": lambda: float("-inf"),
    "1e38": lambda: 1e38, "1e308": lambda: 1e308, "huge": lambda: 10 ** 400, "-huge": lambda: -(10 ** 5000),
    "text": lambda: "0.25", "words": lambda: "good", "bytes": lambda: b"1", "bytearray": lambda: bytearray(b"1"),
    "a text with a number": lambda: Text("1"), "a text of numpy": lambda: numpy.str_("1"),
    "complex": lambda: 1j, "list": lambda: [0.25], "nested": lambda: [[0.25]], "deep": lambda: deep(100_000), "ring": ring,
    "empty": lambda: [], "tuple": lambda: (0.25, 0.5), "generator": endless, "iterator": lambda: itertools.repeat(1.0),
    "set": lambda: {0.25}, "mapping": lambda: {"reward": 1.0}, "no mapping": lambda: Mapping(score=1.0),
    "score of a score": lambda: {"score": {"score": 1.0}}, "arrays": lambda: numpy.array([0.25, 0.5]),
    "array of texts": lambda: numpy.array("x"), "array of objects": lambda: numpy.array([None, 1.0]),
    "decimal nan": lambda: decimal.Decimal("sNaN"), "a number that is none": lambda: Number(1.0),
    "float nan": lambda: Float(float("nan")), "float text": lambda: Float("x"), "float spins": lambda: Float(spin),
    "float leaves": lambda: Float(sys.exit), "a class": lambda: Float, "a function": lambda: spin, "a module": lambda: os,
    "raises": lambda: Raises(RuntimeError), "raises exit": lambda: Raises(SystemExit), "no attributes": RaisesAtAttributes,
    "long": lambda: Length([1.0]), "a trillion": lambda: range(10 ** 12), "spins": spin, "never": never,
    "exit": sys.exit, "exit with a text": lambda: sys.exit("\\x1b[2J"), "os exit": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGSEGV), "interrupt": lambda: raises(KeyboardInterrupt()),
    "silent": lambda: raises(Silent()), "leaves": lambda: raises(Leaves()), "endless": lambda: raises(Endless()),
    "loud": lambda: raises(Loud()), "half a letter": lambda: raises(Half()), "chain": chain, "group": group,
    "stop": lambda: raises(StopIteration()), "generator exit": lambda: raises(GeneratorExit()), "deeper": lambda: deeper(),
    "memory": lambda: bytearray(10 ** 12), "syntax": lambda: eval("1 +"), "warning": lambda: raises(DeprecationWarning("x")),
    "an error is returned": lambda: ValueError("x"), "later": lambda: later(0.25), "later none": lambda: later(None),
}

def deeper(): return deeper()

WRAPPED = {
    "plain": lambda value: value, "score": lambda value: {"score": value, "acc": 1}, "list": lambda value: [value],
    "tuple": lambda value: (value,), "two": lambda value: [value, value], "generator": lambda value: (each for each in [value]),
    "deque": lambda value: collections.deque([value]), "long": lambda value: Long(value, float("nan")),
    "indexed": lambda value: {0: value}, "lists": lambda value: [[value]],
}

def made(response):
    value, _, form = response.partition("|")
    return WRAPPED[form](VALUES[value]())

def ours(response): return made(response)
def verl(data_source, solution_str, ground_truth, extra_info=None): return made(solution_str)
def trl(completions, **kwargs): return made(completions[0])
'''
GOOD = {
    "0": 0.0, "true": 1.0, "half": 0.5, "-0.0": 0.0, "1e37": 1e37, "numpy": 0.25, "an array": 0.25, "a whole of numpy": 3.0,
    "decimal": 0.25, "fraction": 0.25, "an object": 0.25, "threads": 0.25,
}  # fmt: skip
"""Value -> the reward that it is; all others are none."""
_OF_ONE, _OF_LISTS = ("plain", "score"), ("list", "tuple", "deque", "long")
_MESSAGES = [{"role": "user", "content": "q"}]
_SECONDS = 3.0
_MOST_SECONDS = 120
"""A call, and the start of another process where the one before has ended."""


ENDLESS = ("float spins", "long", "a trillion", "spins", "never", "endless", "memory", "deep")
"""Values that take until the time limit, or all memory."""


def value_names() -> list[str]:
    space: dict[str, dict[str, object]] = {}
    exec(CODE, space)
    return [*space["VALUES"]]


class Rewards:
    """A call whose result is a number gives it as the reward; any other one fails its own sample, in time, and the next sample of
    the same process has its reward."""

    def __init__(self, root: Path) -> None:
        (root / "rewards.py").write_text(CODE)
        self.values = value_names()
        self._pools = {
            form: RewardPool(
                RewardConfig(
                    functions={f"{root}/rewards.py:{form}": 1.0}, workers=1, timeout_seconds=_SECONDS, memory_mb=4000
                )
            )
            for form in ("ours", "verl", "trl")
        }

    def __call__(self, number: int) -> tuple[str, str]:
        draw = random.Random(number)
        form = draw.choice(sorted(self._pools))
        usual = _OF_LISTS if form == "trl" else _OF_ONE
        value = self.values[number % len(self.values)]
        wrapped = (
            draw.choice(usual) if draw.random() < 0.7 else draw.choice([*_OF_ONE, *_OF_LISTS, "two", "generator", "lists"])
        )
        return self.case(form, value, wrapped)

    def case(self, form: str, value: str, wrapped: str) -> tuple[str, str]:
        """(outcome, fault) of a call in one of the three forms."""
        expected = self._expected(form, value, wrapped)
        begin = time.monotonic()
        sample, error = self._score(form, f"{value}|{wrapped}")
        seconds = time.monotonic() - begin
        other, other_error = self._score(form, "half|list" if form == "trl" else "half|plain")
        faults = []
        if expected is None and not (sample.reward_failed and error):
            faults.append(f"the reward is {sample.reward}, and not an error")
        if expected is not None and sample.reward != expected:
            faults.append(f"the reward is {sample.reward} and not {expected}: {error}")
        if other.reward != 0.5:
            faults.append(f"the next sample has {other.reward}: {other_error}")
        if seconds > _MOST_SECONDS:
            faults.append(f"{seconds:.0f} s")
        if error is not None and len(error) > 10_000:
            faults.append(f"an error of {len(error)} letters")
        outcome = "a reward" if expected is not None else "an error of its sample"
        return outcome, f"{form}, {value} as {wrapped}: {'; '.join(faults)}"[:1500] if faults else ""

    def _expected(self, form: str, value: str, wrapped: str) -> float | None:
        later = value == "later" and (wrapped == "plain" and form != "trl")
        if form == "trl":
            # A column of one number is a list too.
            return GOOD.get(value) if wrapped in _OF_LISTS else _ROWS.get((value, wrapped))
        return 0.25 if later else GOOD.get(value) if wrapped in _OF_ONE else None

    def _score(self, form: str, text: str) -> tuple[Sample, str | None]:
        pool = self._pools[form]
        sample = Sample([1], [0.0], text, "answered", 0)
        return sample, pool.wait([pool.submit(Prompt(0, [1], "mine", "q", "t", messages=_MESSAGES), sample)])

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


_ROWS = {("list", "plain"): 0.25}
"""Lists that TRL takes as they are."""


PIECES = (
    *"{}()[]^_%$°+-*/!,.:;#&|'\"`~@ \n=<>", "**", "//", "\\\\", "####", "#### ", "\\boxed{", "\\frac", "\\sqrt", "\\text{", "\\pi", "\\infty",
    "\\cup", "\\in", "\\%", "\\$", "\\left", "\\right", "\\{", "\\}", "\\log", "\\sum", "\\lim", "\\to", "\\pmod", "\\binom", "\\overline",
    "\\cdot", "\\ldots", "\\begin{pmatrix}", "\\end{pmatrix}", "\\begin{cases}", "\\pm", "\\ne", "\\approx", "\\operatorname{", "{,}",
    "1", "2", "10", "0.5", "1,000", "x", "y", "e", "i", " or ", "\\text{ and }", "answer is ", "Answer:", "<answer>", "</answer>", "</think>",
    # Digits that are no decimals, decimals that are not ASCII, and numbers that are neither.
    "²", "₂", "①", "❷", "٣", "१", "３", "𝟗", "½", "Ⅷ", "三", "−", "–", "×", "÷", "√", "π", "∞", "≤", "≠", "\u200b", "\u00a0", "中", "é", "😀",
)  # fmt: skip
ANSWER_TRUTHS = {
    "math": ("5", "\\frac{1}{2}", "(1,2)", "x^2", "\\text{A}", "[0,\\infty)", "2,3", "x=5", "50\\%", "10_2", "\\{1,2\\}"),
    "math_any": ('["5", "x^2"]',), "gsm8k": ("5", "0.5", "1,000"), "format": ("",), "multiple_choice": ("A",), "verl_gsm8k": ("5",),
    "verl_math": ("5", "\\frac{1}{2}"), "verl_math_dapo": ("5",), "verl_math_dapo_boxed": ("5",),
    "countdown": ('{"target": 98, "numbers": [44, 19, 35]}',), "repetition": ("",), "think": ("",),
}  # fmt: skip
"""Built-in reward -> truths. Those for mathematics come first and more often."""
FRAMES = (
    "ANSWER",
    "so $\\boxed{ANSWER}$.",
    "\\boxed{x = ANSWER}",
    "so\n#### ANSWER",
    "The answer is **ANSWER**.",
    "it is ANSWER cm²",
)


class Answers:
    """A built-in reward gives a finite number for any response, and no error."""

    def __init__(self, root: Path) -> None:
        """Like those of the other attacks; no file is needed."""

    def __call__(self, number: int) -> tuple[str, str]:
        draw = random.Random(number)
        name = draw.choice(("math", "math", "gsm8k", *ANSWER_TRUTHS))
        answer = "".join(draw.choices(PIECES, k=draw.randint(1, 7)))
        response = draw.choice(FRAMES).replace("ANSWER", answer)
        truth = draw.choice(ANSWER_TRUTHS[name])
        row = {"ground_truth": truth, "prompt": "q", "prompts": "q", "data_source": "mine", "extra_info": {}, "columns": {}}
        try:
            value = within(1.0, lambda: forms.call(name, rules.resolve(name), {"response": response, **row}))
        except TooLongError:
            return "too long", ""
        except Exception as error:
            return "an error", f"{name}({response!r}, {truth!r}): {error!r}"
        is_number = value is not None and math.isfinite(value)
        return "a reward", "" if is_number else f"{name}({response!r}, {truth!r}) is {value}"

    def close(self) -> None:
        """Do nothing: no process was started."""
