"""Programs that a model wrote: right ones pass, wrong ones do not, and hostile ones reach nothing and leave nothing."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from fivefold.build import start_reward_pool
from fivefold.config.scoring import CodeConfig, RewardConfig
from fivefold.keys.findings import Findings
from fivefold.reward.choose import check_rewards, choose_rewards
from fivefold.reward.code import confine
from fivefold.reward.code.cases import program_of, read_cases, same_text
from fivefold.reward.code.reward import ProgramTests
from fivefold.reward.code.sandbox import Sandbox
from fivefold.reward.code.server import PREFIX
from fivefold.reward.pool import RewardPool
from fivefold.types import Prompt, Sample
from tests.support.commands import LONGEST, gone, wait_for

pytestmark = pytest.mark.skipif(confine.missing() is not None, reason=f"{confine.missing()}")


@pytest.fixture(scope="module")
def tester():
    """One sandbox for all: what a program leaves would be met by those after it."""
    tests = ProgramTests(test_seconds=20.0, memory_mb=512, sample_seconds=LONGEST)
    yield tests
    tests.close()


def run(tester: ProgramTests, program: str, input_text: str = "", function: str | None = None, seconds: float = 20.0):
    return tester.sandbox.run(program, input_text, function, seconds, LONGEST)


# --- what is right -------------------------------------------------------------------------------------------------------

DOUBLE = "Think first.\n```python\nprint(1)\n```\nBetter:\n```python\nfor line in open(0): print(2 * int(line))\n```\nDone."
ADD = "```py\ndef add(a, b):\n    return a + b\n```"
METHOD = "```\nclass Solution:\n    def pairs(self, xs: List[int]) -> List[List[int]]:\n        return list(combinations(xs, 2))\n```"
STDIN = {"inputs": ["1\n2\n", ["3", "4"], ""], "outputs": ["2\n4\n", ["6", "8"], ""]}
CALLS = {"inputs": [[1, 2], ["a", "b"], [[1], [2]]], "outputs": [3, ["ab"], [[1, 2]]], "fn_name": "add"}
LIVE = [
    {"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}},
    {"input": "[1]\n[2]", "output": "[1, 2]", "testtype": "functional"},
]
CHECKS = [
    {
        "assert_code": "from solution import add\n\ndef test_numbers():\n    assert add(1, 2) == 3\n\ndef test_texts():\n    assert add('a', 'b') == 'ab'"
    },
    {"assert_code": "assert add(List[int] and [1], []) == [1]"},
]
LIVE_STDIN = [{"input": "5\n", "output": "10\n", "testtype": "stdin", "metadata": {}}]
FRACTION = [
    (DOUBLE, STDIN, 1),
    (DOUBLE, LIVE_STDIN, 1),
    (ADD, CALLS, 1),
    (ADD, LIVE, 1),
    (METHOD, {"inputs": [[[1, 2, 3]]], "outputs": [[[1, 2], [1, 3], [2, 3]]], "fn_name": "pairs"}, 1),
    ("print(2 * int(input()))", {"inputs": ["1", "2"], "outputs": ["2", "5"]}, 0.5),
    ("print(1 / 3)", {"inputs": [""], "outputs": ["0.33333333"]}, 1),
    ("print(0.3)", {"inputs": [""], "outputs": ["0.33333333"]}, 0),
    ("print(12345678)", {"inputs": [""], "outputs": ["12345679"]}, 0),
    ("print('a  b')", {"inputs": [""], "outputs": ["a b"]}, 1),
    ("print('Yes')", {"inputs": [""], "outputs": ["YES"]}, 0),
    ("print(input())", [{"stdin": "5\n", "expected_stdout": "5"}, {"stdin": "6", "expected_stdout": "7"}], 0.5),
    (ADD, CHECKS, 1),
    ("def add(a, b): return str(a) + str(b)", CHECKS, 0),
    ("def add(a, b): return a + b if isinstance(a, int) else a", CHECKS, 0.5),
    ("def add(a, b): return [1] if a == [1] else 0", CHECKS, 0.5),
    ("import os, sys\nsys.exit(0)", CHECKS, 0),
    ("import os\ndef add(a, b): os._exit(0)", CHECKS, 0),
    ("def add(a, b): raise SystemExit(0)", CHECKS, 0),
    ("def add(a, b): return str(a) + str(b)", CALLS, 1 / 3),
    ("def other(a, b): return a + b", CALLS, 0),
    ("def add(a, b) return a + b", CALLS, 0),
    ("print(2)\nraise ValueError", {"inputs": [""], "outputs": ["2"]}, 0),
    ("print(2)\nexit()", {"inputs": [""], "outputs": ["2"]}, 1),
    ("print(2)\nexit(1)", {"inputs": [""], "outputs": ["2"]}, 0),
    ("import atexit\natexit.register(print, 2)", {"inputs": [""], "outputs": ["2"]}, 1),
    ("import sys, threading\nthreading.stack_size(1 << 26)\nsys.setrecursionlimit(10**6)\ndef deep(n): return n and 1 + deep(n - 1)\n"
     "t = threading.Thread(target=lambda: print(deep(50000)))\nt.start()", {"inputs": [""], "outputs": ["50000"]}, 1),
    ("open('notes', 'w').write('7')\nprint(open('notes').read())", {"inputs": ["", ""], "outputs": ["7", "7"]}, 1),
    ("import os\nprint(os.listdir())\nopen('left', 'w')", {"inputs": ["", ""], "outputs": ["[]", "[]"]}, 1),
    ("import numpy, xml.dom.minidom\nprint(numpy.arange(4).sum())", {"inputs": [""], "outputs": ["6"]}, 1),
    ("print('é', input())", {"inputs": ["\u2028ü"], "outputs": ["é \u2028ü"]}, 1),
    ("", {"inputs": [""], "outputs": ["1"]}, 0),
]  # fmt: skip


@pytest.mark.parametrize(("response", "tests", "share"), FRACTION)
def test_the_share_of_tests_that_pass(tester, response, tests, share):
    passed, count = tester.passed(response, json.dumps(tests), to_the_end=True)
    assert passed / count == pytest.approx(share)
    passed, count = tester.passed(response, json.dumps(tests), to_the_end=False)
    assert (passed == count) == (share == 1)


def test_a_large_input_and_output_go_through(tester):
    numbers = "\n".join(map(str, range(300_000)))
    assert run(tester, "import sys\nsys.stdout.write(sys.stdin.read())", numbers).output == numbers


@pytest.mark.parametrize(
    "truth", ["", "72", "{}", "[]", '{"inputs": [1], "outputs": []}', "[1]", '{"inputs": 1, "outputs": 2}', "null"]
)
def test_a_ground_truth_without_tests_is_an_error_and_no_zero(truth):
    with pytest.raises(ValueError, match="the ground truth of `code` is JSON of"):
        read_cases(truth)


def test_the_program_is_the_last_block_of_python_or_everything():
    assert program_of("```python\na\n```\n```python\nb\n```\n```text\nc\n```") == "b"
    assert program_of("```\na\n```") == "a"
    assert program_of("a\nb") == "a\nb"
    assert program_of("```" * 300_000) == "```" * 300_000


def test_a_program_in_an_item_of_a_list_is_read_without_the_item_s_indentation():
    program = "def f():\n    if 1:\n\n        return 2\nprint(f())"
    for indent in ("   ", "\t", "  ", ""):
        block = "\n".join(f"{indent}{line}".rstrip() for line in ("```python", *program.split("\n"), "```"))
        assert program_of(f"1. So:\n\n{block}\n\nIt prints 2.") == program
    narrow = "def f():\n  if 1:\n    return 2"
    assert program_of(f"   ```python\n{narrow}\n   ```") == narrow, "the program is not indented with its fence"


def test_spaces_and_empty_lines_at_both_ends_are_not_compared():
    assert same_text("1 \n2\n\n", "1\n2") and not same_text("1\n\n2", "1\n2")
    assert same_text("\n \n  *\n ***  \n", "*\n***")
    assert same_text(" a  1.0", "a 1.00") and not same_text(" a 1.0", " a 1.1") and not same_text("ab", "a b")


# --- what is hostile -----------------------------------------------------------------------------------------------------

TRY = """
def got(what):
    print("GOT", what, flush=True)
def attempt(function):
    try: got(function())
    except BaseException as error: print("refused", type(error).__name__, flush=True)
import ctypes, os, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    found = libc.syscall(number, *arguments)
    if found < 0: raise OSError(ctypes.get_errno(), "refused")
    return found
"""
REFUSED = {
    "reads /etc/passwd": "attempt(lambda: open('/etc/passwd').read())",
    "reads the run directory": "attempt(lambda: open(RUN + '/secret').read()); attempt(lambda: os.listdir(RUN))",
    "lists /": "attempt(lambda: os.listdir('/')); attempt(lambda: os.listdir('/tmp')); attempt(lambda: os.listdir('/proc'))",
    "reads another's environment": "attempt(lambda: open(f'/proc/{PARENT}/environ', 'rb').read())",
    "reads its own of /proc": "attempt(lambda: open('/proc/self/environ').read()); attempt(lambda: open('/proc/self/maps').read())",
    "reads the parent's memory": "attempt(lambda: open(f'/proc/{os.getppid()}/mem', 'rb').read(1))",
    "writes outside": "attempt(lambda: open(RUN + '/new', 'w')); attempt(lambda: open('/tmp/fivefold-new', 'w'));"
    "attempt(lambda: open('/dev/shm/fivefold-new', 'w')); attempt(lambda: open(RUN + '/secret', 'a'))",
    "writes above": "attempt(lambda: open('../fivefold-new', 'w')); attempt(lambda: os.mkdir('../fivefold-new'))",
    "truncates": "attempt(lambda: os.truncate(RUN + '/secret', 0) or 'cut')",
    "changes modes and owners": "attempt(lambda: os.chmod(RUN + '/secret', 0o777) or 'mode');"
    "attempt(lambda: os.chown(RUN + '/secret', 1, 1) or 'owner'); attempt(lambda: os.utime(RUN + '/secret') or 'time')",
    "removes and renames": "attempt(lambda: os.unlink(RUN + '/secret') or 1); attempt(lambda: os.rename(RUN + '/secret', 'mine') or 1)",
    "makes files without names": "attempt(lambda: os.open('.', os.O_TMPFILE | os.O_RDWR)); attempt(lambda: open(os.open('.', os.O_TMPFILE | os.O_WRONLY), 'wb'));"
    "attempt(lambda: call(257, -100, b'.', os.O_TMPFILE | 2, 0o600)); attempt(lambda: call(2, b'.', os.O_TMPFILE | 2, 0o600));"
    "attempt(lambda: call(257, -100, b'.', os.O_TMPFILE | 2 | 1 << 32, 0o600))",
    "links": "attempt(lambda: os.symlink('/etc/passwd', 'link') or open('link').read());"
    "attempt(lambda: os.link(RUN + '/secret', 'link') or open('link').read()); attempt(lambda: os.mkfifo('pipe') or 1)",
    "opens a socket": "attempt(lambda: socket.create_connection(('127.0.0.1', PORT))); attempt(lambda: socket.socket(socket.AF_INET6))",
    "opens a Unix socket": "attempt(lambda: socket.socket(socket.AF_UNIX).connect(chr(0) + ABSTRACT) or 1);"
    "attempt(lambda: socket.socket(socket.AF_UNIX).connect(RUN + '/socket') or 1); attempt(lambda: socket.socketpair())",
    "asks a name server": "attempt(lambda: socket.gethostbyname('example.com'))",
    "forks": "attempt(os.fork); attempt(os.forkpty); attempt(lambda: os.posix_spawn('/bin/sh', ['sh'], {}))",
    "starts a program": "attempt(lambda: os.execv('/bin/sh', ['sh'])); attempt(lambda: __import__('subprocess').run('id'));"
    "attempt(lambda: os.system('touch ' + RUN + '/new') and 1 / 0)",
    "clones by hand": "attempt(lambda: call(56, 17, 0, 0, 0, 0)); attempt(lambda: call(435, 0, 0)); attempt(lambda: call(57)); attempt(lambda: call(58))",
    "leaves the session": "attempt(os.setsid); attempt(lambda: os.setpgid(0, 0) or 1)",
    "kills the parent": "attempt(lambda: os.kill(os.getppid(), 9) or 1); attempt(lambda: os.killpg(0, 9) or 1)",
    "kills another": "attempt(lambda: os.kill(PARENT, 9) or 1); attempt(lambda: os.kill(VICTIM, 9) or 1); attempt(lambda: os.kill(-1, 9) or 1)",
    "kills by handle": "attempt(lambda: os.pidfd_open(VICTIM)); attempt(lambda: call(424, 3, 9, 0, 0))",
    "traces": "attempt(lambda: call(101, 16, VICTIM, 0, 0) or 1); attempt(lambda: call(310, VICTIM, 0, 0, 0, 0, 0) or 1)",
    "limits another": "import resource; attempt(lambda: resource.prlimit(VICTIM, resource.RLIMIT_CPU, (1, 1)) or 1)",
    "raises its limits": "import resource; attempt(lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)) or 1)",
    "signals through a file": "import fcntl; attempt(lambda: fcntl.fcntl(0, fcntl.F_SETOWN, VICTIM) or 1)",
    "makes shared memory": "attempt(lambda: call(29, 4242, 4096, 0o1600)); attempt(lambda: os.memfd_create('x'));"
    "attempt(lambda: __import__('multiprocessing.shared_memory').shared_memory.SharedMemory('ffleft', create=True, size=9))",
    "mounts and leaves its root": "attempt(lambda: os.chroot('/') or 1); attempt(lambda: call(165, b'x', b'/', b'tmpfs', 0, 0));"
    "attempt(lambda: call(272, 0x10000000)); attempt(lambda: call(155, b'/', b'/'))",
    "becomes another": "attempt(lambda: os.setuid(0) or 1); attempt(lambda: os.setuid(1000) or 1); attempt(lambda: call(126, 0, 0))",
    "asks for other doors": "[attempt(lambda n=n: call(n, 0, 0, 0, 0, 0)) for n in (425, 321, 298, 323, 250, 248, 304, 303, 169, 175, 246)]",
    "unlocks itself": "attempt(lambda: libc.prctl(22, 0, 0, 0, 0) and 1 / 0 or 1); attempt(lambda: call(446, 3, 0))",
    "finds open files": "attempt(lambda: [os.fstat(n) for n in range(4, 200)][0])",
    "finds tokens": "attempt(lambda: os.environ['MY_TOKEN']); attempt(lambda: ctypes.c_char_p.in_dll(libc, 'environ') and os.getenv('HOME') or 1 / 0)",
}  # fmt: skip


@pytest.fixture
def outside(tmp_path, monkeypatch, tester):
    """Everything that a program could want to reach; afterwards it is as it was, and nothing is left."""
    run(tester, "")
    monkeypatch.setenv("MY_TOKEN", "do not tell")
    (tmp_path / "secret").write_text("secret")
    victim = subprocess.Popen(["sleep", "1000"])
    listeners = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
    abstract = f"fivefold-{os.getpid()}"
    for listener, name in zip(listeners[1:], ("\0" + abstract, str(tmp_path / "socket")), strict=True):
        listener.bind(name)
        listener.listen()
    server = psutil.Process(tester.sandbox._server.pid)
    before = traces()
    values = {"RUN": str(tmp_path), "PARENT": os.getpid(), "VICTIM": victim.pid, "PORT": listeners[0].getsockname()[1]}
    values |= {"ABSTRACT": abstract, "SERVER": server.pid}
    yield "".join(f"{name} = {value!r}\n" for name, value in values.items())
    assert server.is_running() and server.children(recursive=True) == []
    assert victim.poll() is None
    victim.kill()
    victim.wait()
    for listener in listeners:
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
        listener.close()
    assert (tmp_path / "secret").read_text() == "secret" and (tmp_path / "secret").stat().st_mode & 0o077 == 0o044
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "socket"]
    wait_for(lambda: left_since(before) == [])
    assert run(tester, "print(6 * 7)").output == "42\n"


def left_since(before: tuple[list[str], ...]) -> list[str]:
    """What has come since; what other tests have there at the moment goes with them."""
    return [one for now, then in zip(traces(), before, strict=True) for one in now if one not in then]


def traces() -> tuple[list[str], ...]:
    """What a program could leave over."""
    temporary = Path(tempfile.gettempdir())
    # Ranks of runs in other tests have scratch directories there, with the number of a process in their names.
    return (
        sorted(str(path) for path in temporary.glob("fivefold-*") if not re.match(r"fivefold-\d+-", path.name)),
        sorted(str(file) for box in temporary.glob(f"{PREFIX}*") for file in box.iterdir()),
        [name for name in os.listdir("/dev/shm") if "fivefold" in name or "ffleft" in name],
        Path("/proc/sysvipc/shm").read_text().splitlines(),
    )


@pytest.mark.parametrize("attack", REFUSED)
def test_what_a_program_may_not_do_is_refused(tester, outside, attack):
    ran = run(tester, TRY + outside + REFUSED[attack])
    assert "GOT" not in ran.output, ran
    assert "refused" in ran.output, ran
    assert "secret" not in ran.output and "do not tell" not in ran.output


EXCESSIVE = {
    "endless loop": ("while True: pass", "time"),
    "endless sleep": ("import time\nwhile True: time.sleep(1000)", "time"),
    "endless loop that catches": ("import signal\nfor n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n  except Exception: pass\n"
                                  "while True:\n  try:\n    while True: pass\n  except BaseException: pass", "time"),
    "memory bomb": ("held = []\nwhile True: held.append(bytearray(1 << 20))", "exit code 1|time"),
    "memory bomb that catches": ("held = []\nwhile True:\n  try: held.append(bytearray(1 << 20))\n  except MemoryError: pass", "time"),
    "shared memory bomb": ("import mmap\nheld = []\nwhile True: held.append(mmap.mmap(-1, 1 << 26))", "exit code 1|time"),
    "endless output": ("while True: print('x' * 1000)", "output"),
    "gigabytes at once": ("import os\nwhile True: os.write(1, bytes(1 << 20))", "output"),
    "endless output that catches": ("import os\nwhile True:\n  try: os.write(1, bytes(1 << 20))\n  except OSError: pass", "output"),
    "endless standard error": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "time"),
    "thread bomb": ("import threading, time\nthreading.stack_size(32768)\nwhile True:\n  try: threading.Thread(target=time.sleep, args=(1000,)).start()\n"
                    "  except RuntimeError: pass", "threads"),
    "many files": ("for n in range(10**9): open(str(n), 'w')", "files|exit code 1"),
    "large files": ("n = 0\nwhile True:\n  n += 1\n  try: open(str(n), 'wb').write(bytes(1 << 24))\n  except OSError: pass", "files|time"),
    "deep recursion": ("import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return [f(n + 1)]\nf(0)", "exit code 1|ended by SIGSEGV|time"),
    "deep recursion in C": ("x = []\nfor _ in range(10**5): x = [x]\nprint(repr(x))", "exit code 1|ended by SIGSEGV"),
    "crash": ("import ctypes\nctypes.string_at(0)", "ended by SIGSEGV"),
    "closed files": ("import os\nos.closerange(0, 1000)\nprint(1)", "exit code 1"),
    "huge power": ("9**9**9", "time"),
}  # fmt: skip


@pytest.mark.parametrize("attack", EXCESSIVE)
def test_a_program_that_takes_too_much_is_ended_and_counts_as_wrong(tester, outside, attack):
    program, status = EXCESSIVE[attack]
    before = psutil.virtual_memory().available
    begin = time.monotonic()
    ran = tester.sandbox.run(program, "", None, 0.5, 3.0 if "sleep" in attack else LONGEST)
    assert ran.status in status.split("|"), ran
    assert time.monotonic() - begin < LONGEST / 10
    assert before - psutil.virtual_memory().available < 4 << 30


CHEATS = {
    "exits": "import sys\nsys.exit(0)",
    "exits at once": "import os\nos._exit(0)",
    "looks for the answer in memory": "import gc, re\nfound = [re.search(r'9182\\d\\d', str(x)[:10**5]) for x in gc.get_objects()]\n"
    "print([f[0] for f in found if f][0])",
    "replaces the comparison": "import builtins, json\nclass E(str):\n  __eq__ = lambda s, o: True\n  __hash__ = str.__hash__\n"
    "json.loads = json.dumps = lambda *a, **k: E()\nbuiltins.str = E\nprint(E())",
    "writes the verdict": 'import os\nfor n in range(3, 100):\n  try: os.write(n, b\'{"status": "ended"}\')\n  except OSError: pass',
    "replaces the harness": "import sys\nfor m in list(sys.modules.values()):\n"
    "  for n in list(vars(m)) if m else []:\n    if n in ('is_right', 'same_text', 'same_value', 'run'): setattr(m, n, lambda *a: True)",
    "floods the result": "print('[' * 10**6)",
}
CHEATS_OF_FUNCTIONS = {
    "equals everything": "class E:\n  __eq__ = lambda s, o: True\n  tolist = lambda s: None\ndef f(x): return E()",
    "exits": "import os\ndef f(x): os._exit(0)",
    "writes a result and exits": "import os\ndef f(x):\n  os.write(3, b'true')\n  os._exit(0)",
    "nested result": "import os\ndef f(x):\n  os.write(3, b'[' * 10**6)\n  os._exit(0)",
    "long number": "import os\ndef f(x):\n  os.write(3, b'9' * 10**6)\n  os._exit(0)",
    "not a number": "def f(x): return float('nan')",
    "looks into its callers": "import re, sys\ndef f(x):\n  frame = sys._getframe()\n  while frame:\n    for value in frame.f_locals.values():\n"
    "      found = re.search(r'9182\\d\\d', str(value)[:10**5])\n      if found: return int(found[0])\n    frame = frame.f_back",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_program_that_does_not_know_the_answer_passes_no_test(tester, outside, cheat):
    tests = {"inputs": ["", ""], "outputs": ["918273", "9182735"]}
    assert tester.passed(CHEATS[cheat], json.dumps(tests), to_the_end=True) == (0, 2)


@pytest.mark.parametrize("cheat", CHEATS_OF_FUNCTIONS)
def test_a_function_that_does_not_know_the_answer_passes_no_test(tester, outside, cheat):
    tests = {"inputs": [[1], [2]], "outputs": [918273, [918273]], "fn_name": "f"}
    assert tester.passed(CHEATS_OF_FUNCTIONS[cheat], json.dumps(tests), to_the_end=True) == (0, 2)


def test_nothing_of_a_program_is_left_for_the_next_one(tester):
    """Neither files, nor texts in memory: every program starts as a copy of the same process, which saw none of them."""
    run(tester, "x = '73' + '7373737'\nopen('left', 'w').write(x)\nimport math\nmath.pi = 3\nprint(x)", "7373")
    looking = (
        "import gc, math, os\nfound = [o for o in gc.get_objects() if isinstance(o, (str, list, dict)) and '7373' + '73737' in repr(o)[:10**5]]\n"
        "print(len(os.listdir()), len([o for o in found if o is not globals()]), math.pi > 3)"
    )
    assert run(tester, looking).output.split()[::2] == ["0", "True"]


# --- around it -----------------------------------------------------------------------------------------------------------


def test_a_program_that_never_ends_is_wrong_and_no_failure_of_the_reward():
    tests = json.dumps({"inputs": ["1"] * 50, "outputs": ["1"] * 50})
    config = RewardConfig(
        functions={"code": 1.0, "code_fraction": 0.5}, timeout_seconds=10.0, workers=1, code=CodeConfig(test_seconds=0.5)
    )
    pool = RewardPool(config)
    samples = [Sample([1], [0.0], text, "answered", 0) for text in ("print(input())", "while True: pass")]
    error = pool.wait([pool.submit(Prompt(0, [1], "taco", "q", tests), sample) for sample in samples])
    server = psutil.Process(pool._workers[-1]._process.pid).children()[0].pid
    pool.close()
    assert error is None
    assert [(sample.reward, sample.reward_failed, sample.correct) for sample in samples] == [
        (1.5, False, True),
        (0.0, False, False),
    ]
    wait_for(lambda: gone([server]))


def test_what_runs_ends_and_leaves_no_directory_when_its_reward_process_is_killed():
    before = traces()
    code = (
        "import time\nfrom fivefold.reward.code.sandbox import Sandbox\n"
        "box = Sandbox(512)\nbox.start()\nprint(box._server.pid, flush=True)\nbox.run('while True: pass', '', None, 1000, 1000)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    server = int(process.stdout.readline())
    wait_for(lambda: psutil.Process(server).children() != [])
    (program,) = psutil.Process(server).children()
    process.kill()
    process.wait()
    wait_for(lambda: gone([server, program.pid]))
    wait_for(lambda: left_since(before) == [])


def test_the_sandbox_refuses_to_run_anything_where_the_kernel_cannot_lock_it_up(monkeypatch):
    monkeypatch.setattr(confine, "landlock_version", lambda: 0)
    with pytest.raises(RuntimeError, match="runs no program here: it needs Landlock"):
        Sandbox(512).start()
    monkeypatch.setattr("fivefold.reward.choose.missing", confine.missing)
    findings = Findings(section="reward")
    check_rewards(findings, RewardConfig(functions={"code": 1.0}))
    assert len(findings.errors) == 1 and "it needs Landlock" in findings.errors[0]
    monkeypatch.undo()
    findings = Findings(section="reward")
    check_rewards(findings, RewardConfig(functions={"code": 1.0}))
    assert findings.errors == [] and "Landlock version" in findings.notes[0] and "seccomp" in findings.notes[0]


@pytest.mark.parametrize(("source", "is_locked_up"), [("taco", True), ("gsm8k", False)])
def test_a_run_says_what_locks_programs_up_as_it_starts(source, is_locked_up):
    """Where `code` was chosen by the source of the data too."""
    messages: list[str] = []
    pool = RewardPool(RewardConfig(workers=1))
    truth = json.dumps({"inputs": ["1"], "outputs": ["1"]}) if is_locked_up else "1"
    try:
        start_reward_pool(pool, [Prompt(0, [1], source, "q", truth)], messages.append)
    finally:
        pool.close()
    lines = [line for line in messages if "Landlock version" in line and "seccomp" in line and "limits" in line]
    assert len(lines) == is_locked_up, messages


def test_a_program_that_could_not_be_confined_is_a_failed_reward_and_not_a_0():
    """Landlock takes sixteen rulesets and no more; a machine where locking up fails must not give every program a 0."""
    code = (
        "import ctypes, struct\nfrom fivefold.reward.code import confine\nfrom fivefold.reward.code.sandbox import Sandbox\n"
        "confine._prctl(38, 1)\n"
        "for _ in range(16):\n"
        "    file = confine._syscall(444, struct.pack('Q', 1 << 11), ctypes.c_size_t(8), 0)\n"
        "    confine._syscall(446, file, 0)\n"
        "try: Sandbox(512).start()\n"
        "except RuntimeError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONGEST)
    assert "could not be locked up" in done.stdout, done


def test_code_is_chosen_by_the_usual_names_of_its_sets():
    assert choose_rewards(RewardConfig(), "taco").accuracy == "code"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_jump_of_the_filter_stays_within_it(machine):
    """Of both machines, as only one of them runs here."""
    import struct

    program = [
        struct.unpack("HBBI", confine.seccomp_filter(machine)[i : i + 8])
        for i in range(0, len(confine.seccomp_filter(machine)), 8)
    ]
    assert program[-1][0] == 0x06 and len(program) < 4096
    assert all(i + 1 + max(yes, no) < len(program) for i, (code, yes, no, _) in enumerate(program) if code != 0x06)
