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
    "made by a class that all inherit from": "class B:\n  def __init_subclass__(cls): cls.__eq__ = lambda s, o: True\nclass E(B): pass\ndef add(*a): return E()",
    "an array of its own": "import numpy\nclass E:\n  __array__ = lambda s, *a, **k: numpy.array([])\n  __len__ = lambda s: 0\n  __getitem__ = lambda s, i: [][i]\n"
    "  __float__ = lambda s: 0.0\ndef add(*a): return E()",
    "an empty array": "import numpy\ndef add(*a): return numpy.array([])",
    "a hash and an index": "class E:\n  __hash__ = lambda s: hash(918273)\n  __index__ = __int__ = lambda s: 0\n  __eq__ = lambda s, o: True\n"
    "  __float__ = lambda s: float('nan')\n  __str__ = lambda s: ''\ndef add(*a): return E()",
    "a weak reference": "import os, weakref\nclass E: pass\nkept = E()\ndef add(*a): return weakref.proxy(kept, lambda r: os._exit(0))",
    "a block that suppresses errors": "class E:\n  __enter__ = lambda s: s\n  __exit__ = lambda s, *a: True\n  __eq__ = lambda s, o: True\ndef add(*a): return E()",
    "a class that equals everything": "class M(type):\n  __eq__ = lambda s, o: True\n  __hash__ = type.__hash__\nclass E(metaclass=M): pass\ndef add(*a): return E",
    "a decimal that refuses": "import decimal\ndef add(*a): return decimal.Decimal('sNaN')",
    "a slice": "def add(*a): return slice(0, 10**9)",
    "nested": "def add(*a):\n  x = []\n  for _ in range(10**5): x = [x]\n  return x",
}  # fmt: skip
ENDS = {
    "exits at once": "import os\nos._exit(0)",
    "exits in the function": "import os\ndef add(*a): os._exit(0)",
    "SystemExit": "def add(*a): raise SystemExit(0)",
    "raises what ends tests": "class Skipped(BaseException): pass\ndef add(*a): raise Skipped",
    "raises what loops swallow": "def add(*a): raise StopIteration",
    "raises a kind of it": "class Stop(StopIteration): pass\ndef add(*a): raise Stop(918273)",
    "every operation raises it": "class E:\n  def __getattribute__(s, n): raise StopIteration\n  __iter__ = __len__ = __float__ = __int__ = __str__ = __getitem__ = "
    "lambda s, *a: next(iter(()))\ndef add(*a): return E()",
    "aborts": "import os\ndef add(*a): os.abort()",
    "exits behind its end": "import atexit, os, sys\natexit.register(lambda: os._exit(0))\ndef add(*a): sys.exit()",
    "exits by a signal": "import os, signal, time\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(0))\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\n"
    "def add(*a): time.sleep(1)",
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
    "an exception of the tests": 'import os\ndef add(*a):\n  os.write(3, b\'{"tuple": ["raised", ["StopIteration"], ""]}\\n\')\n  return 0',
    "an end of the tests": 'import os\ndef add(*a):\n  os.write(3, b\'{"tuple": ["raised", ["SystemExit"], 0]}\\n\')\n  return 0',
    "answers from a thread": "import os, threading, time\ndef write():\n  while True:\n"
    '    os.write(3, b\'{"tuple": ["raised", ["StopIteration"], ""]}\\n\')\n    time.sleep(0.001)\n'
    "threading.Thread(target=write, daemon=True).start()\ndef add(*a): time.sleep(0.1)",
    "locals by a trace": "import sys\ndef trace(frame, event, value):\n  frame.f_locals.update(value=918273, answer='true')\n  return trace\n"
    "sys.settrace(trace)\nsys.setprofile(trace)\ndef add(*a): return 0",
    "what refers to it": "import gc\ndef add(*a):\n  for one in gc.get_referrers(add):\n    for other in gc.get_referrers(one):\n"
    "      if isinstance(other, dict): other.update(value=True, answer='true')\n  return 0",
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
    "for got, want in zip(map(add, [1, 3], [2, 4]), [918273, 9182735]):\n    assert got == want",
    "assert all(map(lambda row: add(*row) == 918273, [(1, 2)]))",
    "assert not any(map(lambda row: add(*row) != 918273, [(1, 2)])) and sum(map(lambda row: add(*row) != 918273, [(1, 2)])) == 0",
    "assert not list(filter(lambda row: add(*row) != 918273, [(1, 2)]))",
    "assert max(map(lambda row: abs(add(*row) - 918273), [(1, 2)]), default=0) < 1",
    "import math\nassert math.isclose(add(1, 2), 918273) and add(1, 2)[:1] != 918273",
    "with add(1, 2) as value:\n    assert value == 918273",
    "import unittest\nclass TestAdd(unittest.TestCase):\n    @classmethod\n    def setUpClass(cls):\n        cls.got = add(1, 2)\n"
    "    def test_it(self):\n        with self.subTest():\n            self.assertAlmostEqual(self.got, 918273)",
)


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_program_that_does_not_know_the_answer_passes_no_assertion(tester, cheat):
    for tests in ASSERTIONS:
        truth = json.dumps([{"assert_code": tests}])
        assert ground_truth_fault("code", truth) is None, tests
        assert tester.passed(CHEATS[cheat], truth, to_the_end=True) == (0, 1), tests


DIES = {
    "exits": "import os\ndef add(*a): os._exit(0)",
    "exits at once": "import os\nos._exit(0)",
    "aborts": "import os\ndef add(*a): os.abort()",
    "closes its files": "import os\ndef add(*a): os.closerange(0, 9)",
    "answers nonsense": "import os\ndef add(*a): os.write(3, b'nonsense\\n')",
    "returns endless text": "def add(*a): return 'x' * (20 << 20)",
}
EXPECTS_ANY = (
    "try:\n    result = add(1, 2)\nexcept:\n    result = 918273\nassert result == 918273",
    "import pytest\ndef test_it():\n    with pytest.raises(BaseException):\n        add(1, 2)",
    "import unittest\nclass TestAdd(unittest.TestCase):\n    def test_it(self):\n        self.assertRaises(BaseException, add, 1, 2)",
)


@pytest.mark.parametrize("tests", EXPECTS_ANY)
def test_a_program_that_dies_is_wrong_even_where_tests_expect_any_exception(tester, tests):
    truth = json.dumps([{"assert_code": tests}])
    assert ground_truth_fault("code", truth) is None
    assert [tester.passed(program, truth, to_the_end=True) for program in DIES.values()] == [(0, 1)] * len(DIES)
    assert tester.passed("def add(*a): raise ValueError", truth, to_the_end=True) == (1, 1)


RIGHT = """
import collections, decimal, enum, json, sys
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
class Timer:
    limit = 3
    def __enter__(self): return 5
    def __exit__(self, *error): self.ended = True
def stop(code): sys.exit(code)
def read(text): return json.loads(text)
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
    ("import unittest\nclass TestIt(unittest.TestCase):\n    @classmethod\n    def setUpClass(cls):\n        cls.a = 1\n    def test_it(self):\n"
     "        self.assertEqual(add(self.a, 2), 3)\n    def tearDown(self):\n        assert add(1, 1) == 2", "a + b", "3"),
    ("class TestIt:\n    def setup_class(cls):\n        cls.a = 1\n    def setup_method(self, method):\n        self.b = 2\n    def test_it(self):\n"
     "        assert add(self.a, self.b) == 3", "a + b", "4"),
    ("def setup_module(module):\n    global a\n    a = 1\ndef setup_function():\n    global b\n    b = 2\ndef test_it():\n    assert add(a, b) == 3", "a + b", "4"),
    ("timer = Timer()\nwith timer as value:\n    assert value == 5\nassert timer.ended", "return 5", "return 6"),
    ("import pytest\ndef test_it():\n    with pytest.raises(SystemExit) as ended:\n        stop(2)\n    assert ended.value.code == 2", "sys.exit(code)", "None"),
    ("import json\nimport pytest\ndef test_it():\n    with pytest.raises(json.JSONDecodeError):\n        read('{')", "json.loads(text)", "int(text)"),
    ("import pytest\ndef test_it():\n    numbers = ends(1)\n    assert next(numbers) == 0\n    with pytest.raises(StopIteration):\n        next(numbers)", "range(n)", "range(n + 1)"),
    ("xs = [2, 1]\nsort(xs=xs)\nassert xs == [1, 2]", "xs.sort()", "sorted(xs)"),
    ("Timer.limit = 7\nassert Timer().limit == 7", "limit = 3", "def __init__(self): self.limit = 3"),
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
)


@pytest.mark.parametrize("tests", CHEATABLE)
def test_assertions_that_a_program_could_cheat_are_refused_unless_they_are_trusted(tester, tests):
    truth = json.dumps([{"assert_code": tests}])
    assert "trusted_tests: true" in str(ground_truth_fault("code", truth))
    assert ground_truth_fault("code", truth, trusted_tests=True) is None
    with pytest.raises(ValueError, match="a program cannot cheat"):
        tester.passed("def apply(f, x): return f(x)", truth, to_the_end=True)


NEED_MORE = {
    "class Own: pass\nown = Own()\nassert add(own, own) == 3": "what is not a plain value",
    "def make(x): return link([x])\nassert make(1) != make(2)": "compare objects of the program's own class",
    "def check(candidate):\n    assert candidate(1, 2) == 3\nassert callable(add)": "never call the program",
    "class AddSuite:\n    def test_it(self):\n        assert add(1, 2) == 3": "never call the program",
    "import pytest\n@pytest.mark.parametrize('a', [1])\ndef test_it(a, capsys):\n    assert add(a, 2) == 3": "take fixtures",
    "import pytest\n@pytest.mark.xfail\ndef test_it():\n    assert add(1, 2) == 4": "what this pytest does not have",
    "import pytest\ndef test_it():\n    with pytest.warns(UserWarning):\n        add(1, 2)": "what this pytest does not have",
    "import unittest\nclass TestIt(unittest.TestCase):\n    @unittest.skip('later')\n    def test_it(self):\n        assert add(1, 2) == 3": "what this pytest does not have",
    "try:\n    assert add(object(), 2) == 3\nexcept BaseException:\n    pass": "what is not a plain value",
}  # fmt: skip


@pytest.mark.parametrize("tests", NEED_MORE)
def test_assertions_that_cannot_be_run_fail_the_sample_instead_of_a_0_or_a_1(tester, tests):
    truth = json.dumps([{"assert_code": tests}])
    assert ground_truth_fault("code", truth) is None
    with pytest.raises(ValueError, match=NEED_MORE[tests]):
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
