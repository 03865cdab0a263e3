"""A process that has imported everything once and forks others, which then start at once and share nothing else.

A fork copies one thread only, so the process never starts a second one: no tensor is computed before the fork.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import psutil

THREADS = int(os.environ.get("FIVEFOLD_TEST_THREADS", "1"))
"""Of each rank that the tests start."""


def send(pipe: socket.socket, value: Any, files: Sequence[int] = ()) -> None:
    # Plain pickle: multiprocessing's own would hand tensors over in shared memory of a process that is about to end.
    content = pickle.dumps(value)
    header = struct.pack("!Q", len(content))
    if files:
        socket.send_fds(pipe, [header], list(files))
    else:
        pipe.sendall(header)
    pipe.sendall(content)


def receive(pipe: socket.socket) -> tuple[Any, list[int]]:
    """The value and the files that came with it; EOFError when the other end is closed."""
    header, files, _, _ = socket.recv_fds(pipe, 8, 8)
    while len(header) < 8:
        header += _some(pipe, 8 - len(header))
    (size,) = struct.unpack("!Q", header)
    content = bytearray()
    while len(content) < size:
        content += _some(pipe, size - len(content))
    return pickle.loads(content), files


def _some(pipe: socket.socket, size: int) -> bytes:
    piece = pipe.recv(min(size, 1 << 20))
    if not piece:
        raise EOFError
    return piece


def fork(body: Callable[[], int | None], new_session: bool = False) -> int:
    """Run `body` in a child and end it with the code that it returns; the child's pid, once its session is its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    ready, ours = os.pipe()
    pid = os.fork()
    if pid:
        os.close(ours)
        os.read(ready, 1)
        os.close(ready)
        return pid
    code: Any = 1
    try:
        os.close(ready)
        if new_session:
            os.setsid()
        os.close(ours)
        code = body()
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    end(code if isinstance(code, int) else 0)


def end(code: int) -> NoReturn:
    """End this process without what its parent's copy of Python would do at its end."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def end_all(pid: int) -> None:
    """Kill a process and what it started: saving a checkpoint leaves helpers over that would stay permanently."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def close_all_but(kept: Sequence[int]) -> None:
    """Close every file of this process except standard input, output, error and `kept`, as starting a program does."""
    last = 2
    for file in sorted(set(kept) | {os.sysconf("SC_OPEN_MAX")}):
        os.closerange(last + 1, file)
        last = max(last, file)


def _import_everything() -> None:
    """What ranks and commands import, also late: transformers finds its classes when first asked. (pyarrow starts a thread.)"""
    import gc
    import warnings

    warnings.simplefilter("ignore")
    # Megatron-Core imports these packages for its own inference. With them the GPU was open before the fork, which forbids it.
    sys.modules |= dict.fromkeys(("flashinfer", "torch_memory_saver"))  # type: ignore[arg-type]
    import torch
    import transformers

    for module in (
        "fivefold.build", "fivefold.checkpoint.export", "fivefold.cli", "fivefold.data.prepare", "fivefold.launch.rank",
        "fivefold.observability.report", "fivefold.trainer.train",
    ):  # fmt: skip
        importlib.import_module(module)
    for name in ("AutoTokenizer", "AutoModelForCausalLM", "AutoModelForSequenceClassification"):
        getattr(transformers, name)
    for family in ("Llama", "Qwen2", "Qwen3", "Qwen3Moe", "DeepseekV3"):
        getattr(transformers, f"{family}ForCausalLM")
    if importlib.util.find_spec("megatron.bridge") is not None:
        from fivefold.megatron.bridge.external import import_bridge

        for kind in ("mbridge", "megatron-bridge"):
            import_bridge(kind)
    # A table of regular expressions that is built at the first loading of a model, and kept.
    transformers.conversion_mapping.get_checkpoint_conversion_mapping("qwen3")
    torch.set_num_threads(1)
    # What is there stays: a collector that looked at it in every child would also copy its pages.
    gc.collect()
    gc.freeze()


_threads_of_imports = 1
"""Threads that the imports left over: some builds of torch keep a few, which hold nothing that a child needs."""


def serve(number: int) -> None:
    """Fork and reap what the process at the other end of this socket asks for, until it closes it."""
    # Ctrl-C goes to the tests, which then end what they started.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    commands = socket.socket(fileno=number)
    _import_everything()
    global _threads_of_imports
    _threads_of_imports = psutil.Process().num_threads()
    while True:
        files: list[int] = []
        answer: tuple[bool, Any]
        try:
            (name, *arguments), files = receive(commands)
            answer = (True, _fork(files, *arguments) if name == "fork" else _reaped(*arguments))
        except EOFError:
            return
        except Exception:
            answer = (False, traceback.format_exc())
        for file in files:
            os.close(file)
        send(commands, answer)


def _fork(files: list[int], function: Callable[..., int | None], arguments: tuple[Any, ...], new_session: bool) -> int:
    threads = psutil.Process().num_threads()
    if threads > _threads_of_imports:
        raise RuntimeError(
            f"a process that forks must not start threads after its imports: got {threads}, {_threads_of_imports} before"
        )

    def body() -> int | None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        close_all_but(files)
        return function(*arguments, files)

    return fork(body, new_session)


def _reaped(pid: int, seconds: float) -> int | None:
    """The exit code of a child as subprocess tells it, None if it still runs after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.005)


def hidden_gpus() -> dict[str, str]:
    """Environment in which torch finds no GPU, and asks no driver to find none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    return {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1", _KEPT: visible}


def show_gpus() -> None:
    """Undo `hidden_gpus` in this process, before it has asked for any."""
    del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.pop(_KEPT)
    if os.environ["CUDA_VISIBLE_DEVICES"] == "all":
        del os.environ["CUDA_VISIBLE_DEVICES"]


_KEPT = "FIVEFOLD_TEST_VISIBLE_DEVICES"


class Zygote:
    """Started when first asked. Functions live at the top of a module; `function(*arguments, files)` runs in the child."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._commands: socket.socket | None = None

    def fork(
        self,
        function: Callable[..., int | None],
        arguments: tuple[Any, ...],
        files: Sequence[int] = (),
        new_session: bool = False,
    ) -> int:
        """The child's pid; it has standard input, output, error and `files`, under numbers that the function is told."""
        return self._ask(("fork", function, arguments, new_session), files)

    def reap(self, pid: int, seconds: float) -> int | None:
        """The exit code of a forked process, or None if it runs on."""
        return self._ask(("reap", pid, seconds))

    def _ask(self, request: Any, files: Sequence[int] = ()) -> Any:
        if self._commands is None:
            self._commands, theirs = socket.socketpair()
            code = f"import sys; sys.path[:] = {json.dumps(sys.path)}; from tests.support.zygote import serve; serve({theirs.fileno()})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # NumPy's OpenBLAS starts its threads when it is imported. A driver that was asked before the fork, CUDA's or
                # NVML's, is of no use after it: a library that asks at its import whether there are GPUs finds none.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **hidden_gpus()},
            )
            theirs.close()
        send(self._commands, request, files)
        (good, answer), _ = receive(self._commands)
        if not good:
            raise RuntimeError(answer)
        return answer

    def close(self) -> None:
        if self._commands is not None and self._process is not None:
            self._commands.close()
            self._process.wait()
            self._commands = self._process = None


zygote = Zygote()
"""One for all tests of a process."""
