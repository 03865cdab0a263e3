"""Assertion tests of programs: right programs pass, and those that forge a verdict do not."""

from __future__ import annotations

import contextlib
import json

import pytest

from fivefold.reward.code import confine
from fivefold.reward.code.reward import ProgramTests
from fivefold.reward.code.sandbox import _file
from fivefold.reward.rules import ground_truth_fault
from tests.support.commands import LONGEST

pytestmark = pytest.mark.skipif(confine.missing() is not None, reason=f"{confine.missing()}")


@pytest.fixture(scope="module")
def tester():
    tests = ProgramTests(test_seconds=2.0, memory_mb=512, sample_seconds=LONGEST)
    yield tests
    tests.close()


LOOK = """
import gc, os, re, sys
def seen(frame):
    while frame:
        yield from (*frame.f_locals.values(), *frame.f_globals.values(), *frame.f_code.co_consts)
        frame = frame.f_back
"""
OBJECTS = {
    "equals everything": "class E:\n  __eq__ = lambda s, o: True\ndef add(*a): return E()",
    "a number that equals everything": "class E(int):\n  __eq__ = lambda s, o: True\n  __hash__ = int.__hash__\ndef add(*a): return E(7)",
    "a list that equals and has everything": "class E(list):\n  __eq__ = __contains__ = lambda s, o: True\ndef add(*a): return E()",
    "true, near and in everything": "class E:\n  __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = lambda s, o: True\n"
    "  __bool__ = lambda s: True\n  __sub__ = __rsub__ = lambda s, o: 0.0\n  __abs__ = lambda s: 0.0\ndef add(*a): return E()",
    "a class that is another": "class D:\n  __class__ = int\n  __eq__ = lambda s, o: True\n  tolist = lambda s: s\ndef add(*a): return D()",
    "parts that answer everything": "class E:\n  __getattr__ = lambda s, n: E()\n  __getitem__ = __call__ = lambda s, *a: E()\n"
    "  __iter__ = lambda s: iter([E()])\n  __len__ = lambda s: 1\n  __eq__ = lambda s, o: True\ndef add(*a): return E()",
    "a decimal that equals everything": "import decimal\nclass E(decimal.Decimal):\n  __eq__ = lambda s, o: True\n  __hash__ = None\ndef add(*a): return E(1)",
    "not a number": "def add(*a): return float('nan')",
    "a text": "def add(*a): return 'True'",
    "endless": "def add(*a):\n  while True: yield 1",
    "nested": "def add(*a):\n  x = []\n  for _ in range(10**5): x = [x]\n  return x",
}  # fmt: skip
ENDS = {
    "exits at once": "import os\nos._exit(0)",
    "exits in the function": "import os\ndef add(*a): os._exit(0)",
    "SystemExit": "def add(*a): raise SystemExit(0)",
    "raises what ends tests": "class Skipped(BaseException): pass\ndef add(*a): raise Skipped",
    "raises what loops swallow": "def add(*a): raise StopIteration",
    "prints its callers' frames and exits": LOOK + "def add(*a):\n  for value in seen(sys._getframe()):\n    print(value)\n"
    "    try: os.write(3, str(value).encode() + b'\\n')\n    except OSError: pass\n  sys.stdout.flush(); os._exit(0)",
}
READS = {
    "frames": LOOK + "def add(*a):\n  for value in seen(sys._getframe()):\n    found = re.search(r'9182\\d\\d', str(value)[:10**5])\n"
    "    if found: return int(found[0])",
    "memory": LOOK + "def add(*a):\n  for value in gc.get_objects():\n    found = re.search(r'9182\\d\\d', str(value)[:10**4])\n"
    "    if found: return int(found[0])",
    "descriptors": "import os, re\ndef add(*a):\n  for n in range(64):\n    try:\n      found = re.search(rb'9182\\d\\d', os.pread(n, 10**6, 0))\n"
    "      if found: return int(found[0])\n    except OSError: pass",
}  # fmt: skip
REPLACES = {
    "builtins": "import builtins\nbuiltins.AssertionError = type('A', (BaseException,), {})\n"
    "builtins.isinstance = builtins.all = lambda *a: True\ndef add(*a): return 1",
    "the harness": "import sys\nfor m in list(sys.modules.values()):\n  for n in list(vars(m)) if m else []:\n"
    "    if n in ('run_tests', 'dumps', 'loads', '_near', 'ask', 'same_value', '_done'):\n      try: setattr(m, n, lambda *a, **k: True)\n"
    "      except Exception: pass\ndef add(*a): return True",
    "answers": "import os\ndef add(*a):\n  for n in range(3, 64):\n"
    '    try: os.write(n, b\'{"status": "ended"}\\n\' + b\'{"tuple": ["value", true, []]}\\n\' * 9)\n    except OSError: pass\n  return 0',
    "an object of the tests": 'import os\ndef add(*a):\n  os.write(3, b\'{"tuple": ["value", {"kept": 7}, [1, 2]]}\\n\')\n  return 0',
    "a flood": "import os\ndef add(*a):\n  while True: os.write(3, b'[' * 10**6)",
    "arguments": "def add(a, *b):\n  try: a.clear(); a.append(918273)\n  except Exception: pass\n  return a",
}
CHEATS = {f"{kind}: {name}": text for kind, part in (("objects", OBJECTS), ("ends", ENDS), ("reads", READS), ("replaces", REPLACES))
          for name, text in part.items()}  # fmt: skip
ASSERTIONS = (
    "assert add(1, 2) == 918273",
    "assert add(1, 2) in [918273, 9182735]",
    "assert add([1], 2) == [918273, 2]",
    "assert 918270 < add(1, 2) < 918275",
    "import pytest\nassert add(1, 2) == pytest.approx(918273.5)",
    "assert abs(add(1, 2) - 918273) < 1e-6",
    "assert not add(1, 2) and add(1, 2) is False and add(2, 2) == 918273",
    "from solution import add as plus\ndef test_it():\n    expected = 918273\n    result = plus(1, 2)\n    assert result == expected, f'{result}'",
    "import pytest\n@pytest.mark.parametrize('a, want', [(1, 918273), (2, 918274)])\ndef test_it(a, want):\n    assert add(a, a) == want",
    "import unittest\nclass TestAdd(unittest.TestCase):\n    def test_it(self):\n        self.assertEqual(add(1, 2), 918273)",
    "import pytest\ndef test_it():\n    with pytest.raises(ValueError, match='918273'):\n        add(1, 2)",
    "for a, want in {1: 918273, 2: 918274}.items():\n    assert add(a, 0) == want",
    "assert add(1, 2)[0].total == 918273",
    "assert [x for x in add(1, 2)][:1] == [918273]",
)


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_program_that_does_not_know_the_answer_passes_no_assertion(tester, cheat):
    for tests in ASSERTIONS:
        truth = json.dumps([{"assert_code": tests}])
        assert ground_truth_fault("code", truth) is None, tests
        assert tester.passed(CHEATS[cheat], truth, to_the_end=True) == (0, 1), tests


RIGHT = """
import collections, decimal, enum
def add(a, b): return a + b
def sort(xs): xs.sort()
def gcd(a, b): return gcd(b, a % b) if b else a
def divide(a, b): return a / b
def pair(a): return (a, {a: {1, 2}})
def count(text): return collections.Counter(text)
def ends(n): yield from range(n)
def fail(text): raise Wrong(text)
def numbers(n):
    import numpy
    return numpy.arange(n) * 0.5
class Wrong(ValueError): pass
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
def link(xs):
    node = None
    for x in reversed(xs): node = Node(x, node)
    return node
print("a program may write what it wants")
"""
HOLD = (
    ("from solution import add as plus, count as tally\nassert plus(1, 2) == 3", "a + b", "a - b"),
    ("from solution import gcd\nassert gcd(4, 6) == 2", "a % b", "b"),
    ("assert gcd(4, 6) == 2", "a % b", "b"),
    ("from solution import *\nassert add(1, 2) == 3\nassert add([1], [2]) == [1, 2]\nassert add(2**80, 1) == 2**80 + 1", "a + b", "a - b"),
    ("from solution import sort\ndef test_in_place():\n    xs = [3, 1, 2]\n    assert sort(xs) is None\n    assert xs == [1, 2, 3]", "xs.sort()", "sorted(xs)"),
    ("import pytest\nfrom solution import divide\ndef test_it():\n    assert divide(1, 3) == pytest.approx(0.333333, rel=1e-3)\n"
     "    with pytest.raises(ZeroDivisionError):\n        divide(1, 0)", "a / b", "b and a / b"),
    ("import solution\nassert solution.pair(1) == (1, {1: {2, 1}}) and isinstance(solution.pair(1), tuple)", "(a, {a: {1, 2}})", "[a, {a: {1, 2}}]"),
    ("assert count('aab') == {'a': 2, 'b': 1} and count('aab')['a'] == 2", "Counter(text)", "Counter('ab')"),
    ("assert list(ends(250)) == list(range(250)) and next(ends(3)) == 0 and 7 in ends(9)", "range(n)", "range(n + 1)"),
    ("import pytest\nfrom solution import Wrong, fail\ndef test_it():\n    with pytest.raises(Wrong) as caught:\n        fail('so')\n"
     "    assert str(caught.value) == 'so'\n    with pytest.raises(ValueError, match='s.'):\n        fail('so')", "raise Wrong(", "raise KeyError("),
    ("s = Stack()\ns.push(4)\ns.push([5])\nassert len(s) == 2 and list(s) == [4, [5]]\nassert s.pop() == [5]\nassert s.items == [4]", "append(x)", "insert(0, x)"),
    ("node = link([1, 2])\nassert node.value == 1 and node.next.value == 2 and node.next.next is None\nnode.value = 7\nassert node.value == 7", "reversed(xs)", "xs"),
    ("assert numbers(3) == [0.0, 0.5, 1.0]", "0.5", "0.6"),
    ("import unittest\nclass TestIt(unittest.TestCase):\n    def setUp(self):\n        self.a = 1\n    def test_it(self):\n"
     "        self.assertEqual(add(self.a, 2), 3)\n        self.assertRaises(TypeError, add, 1, 'a')", "a + b", "3"),
    ("import pytest\n@pytest.mark.parametrize('a', [1, 2])\n@pytest.mark.parametrize('b', [3, 4])\ndef test_it(a, b):\n    assert add(a, b) == a + b", "a + b", "4"),
)  # fmt: skip


@pytest.mark.parametrize(("tests", "right", "wrong"), HOLD)
def test_a_right_program_passes_assertions_of_every_form_and_a_wrong_one_fails(tester, tests, right, wrong):
    truth = json.dumps([{"assert_code": tests}])
    assert ground_truth_fault("code", truth) is None
    assert tester.passed(RIGHT, truth, to_the_end=True) == (1, 1)
    assert right in RIGHT
    assert tester.passed(RIGHT.replace(right, wrong), truth, to_the_end=True) == (0, 1)


CHEATABLE = (
    "assert Vector(1) + Vector(2) == Vector(3)",
    "assert apply(lambda x: x + 1, 2) == 3",
    "from solution import Shape\nassert isinstance(make(), Shape)",
    "from solution import gcd\nfrom unittest.mock import patch\nassert gcd(1, 2) == 1",
    "def test_it(capsys):\n    show()\n    assert capsys.readouterr().out == 'a'",
    "assert 1 + 1 == 2",
    "add(1, 2)",
)


@pytest.mark.parametrize("tests", CHEATABLE)
def test_assertions_that_a_program_could_cheat_are_refused_unless_they_are_trusted(tester, tests):
    truth = json.dumps([{"assert_code": tests}])
    assert "trusted_tests: true" in str(ground_truth_fault("code", truth))
    assert ground_truth_fault("code", truth, trusted_tests=True) is None
    with pytest.raises(ValueError, match="a program cannot cheat"):
        tester.passed("def apply(f, x): return f(x)", truth, to_the_end=True)


def test_assertions_that_need_the_program_s_process_fail_the_sample_instead_of_a_0(tester):
    truth = json.dumps([{"assert_code": "class Own: pass\nown = Own()\nassert add(own, own) == 3"}])
    with pytest.raises(ValueError, match="what is not a plain value"):
        tester.passed(RIGHT, truth, to_the_end=True)


def test_tests_that_end_before_their_program_has_begun_keep_their_verdict(tester):
    for _ in range(5):
        with contextlib.ExitStack() as opened:
            files = [_file("", opened) for _ in range(4)]
            tester.sandbox._begin({"seconds": 2.0, "clock": LONGEST, "serves": True}, files)
            tester.sandbox._stop(LONGEST)
    assert tester.passed(RIGHT, json.dumps([{"assert_code": "assert add(1, 2) == 3"}]), to_the_end=True) == (1, 1)


def test_trusted_assertions_run_in_the_program_s_process():
    trusting = ProgramTests(test_seconds=20.0, memory_mb=512, sample_seconds=LONGEST, trusted_tests=True)
    truth = json.dumps([{"assert_code": "assert apply(lambda x: x + 1, 2) == 3"}])
    try:
        assert trusting.passed("def apply(f, x): return f(x)", truth, to_the_end=True) == (1, 1)
        assert trusting.passed("def apply(f, x): return x", truth, to_the_end=True) == (0, 1)
    finally:
        trusting.close()
    "async def test_it():\n    assert add(1, 2) == 3",
    "import unittest\nclass TestIt(unittest.IsolatedAsyncioTestCase):\n    async def test_it(self):\n        assert add(1, 2) == 3",
    "import asyncio\nassert asyncio.run(add(1, 2)) == 3",
    "def test_it():\n    yield\n    assert add(1, 2) == 3",
    "assert (add(1, 2) == 3, 'a message')",
    "assert (add(a, 2) == 3 for a in [1])",
    "import pytest\n@pytest.fixture\ndef three():\n    return 3\nclass TestIt:\n    def test_it(self, three):\n        assert add(1, 2) == three",
    "one, other = 1, 2\none = Vector(1)\nassert one == Vector(1)",
    "one = Vector(1)\nassert not one",
    "with Suppressed() as block:\n    raise ValueError\nassert block.ended",
    "import io, sys\nsys.stdout = text = io.StringIO()\nshow()\nassert text.getvalue() == 'a'",
    "import threading\nthread = threading.Thread(target=add)\nthread.start()\nassert add(1, 2) == 3",
    "open('numbers', 'w').write('3')\nassert read('numbers') == 3",
    "import not_installed_anywhere\nassert add(1, 2) == 3",
    "import solution\nsolution.limit = 3\nassert solution.add(1, 2) == 3",
    "import numpy as np\nassert np.allclose(add(1, 2), 3)",
    "import numpy as np\nassert (np.array(add(1, 2)) == np.array([3])).all()",
