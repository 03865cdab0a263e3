"""Signs of life: what a thread sees of the others of its process."""

from __future__ import annotations

import ctypes
import os
import threading
from types import SimpleNamespace

import pytest

from fivefold.distributed import pulse


@pytest.mark.parametrize(
    ("looks", "waited"),
    [
        ([(0, "7"), (2, "7"), (4, "7")], 4),
        # It went on in between, and waits for something else.
        ([(0, "7"), (2, ""), (4, "7")], 0),
        ([(0, "7"), (2, "8"), (4, "8")], 2),
        # Nobody looks within two seconds of the last look.
        ([(0, "7"), (1, ""), (2, "7")], 2),
        ([(0, ""), (1, "7"), (1.5, "7")], 0),
    ],
)
def test_a_wait_in_the_kernel_counts_while_each_look_finds_the_same_thread_in_it(monkeypatch, looks, waited):
    wait, seconds = pulse.KernelWait(), 0.0
    for now, tasks in looks:
        monkeypatch.setattr(pulse, "time", SimpleNamespace(monotonic=lambda now=now: 100.0 + now))
        monkeypatch.setattr(pulse, "_tasks_in_kernel", lambda tasks=tasks: iter(tasks))
        seconds = wait.look()
    assert seconds == waited


def test_a_thread_that_waits_for_a_child_before_it_runs_its_program_waits_in_the_kernel(tmp_path):
    """The parent of a vfork cannot be interrupted until the child opens its program, here one whose opening blocks."""
    pipe = tmp_path / "program"
    os.mkfifo(pipe)
    tasks: list[int] = []

    # Python's own functions would keep its lock.
    libc, actions, child = ctypes.CDLL(None), ctypes.create_string_buffer(1024), ctypes.c_int()
    libc.posix_spawn_file_actions_init(actions)
    libc.posix_spawn_file_actions_addopen(actions, 0, os.fsencode(pipe), os.O_RDONLY, 0)
    words = (ctypes.c_char_p * 2)(b"true", None)

    def start() -> None:
        tasks.append(threading.get_native_id())
        libc.posix_spawn(ctypes.byref(child), b"/bin/true", actions, None, words, (ctypes.c_char_p * 1)(None))

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    while not tasks or str(tasks[0]) not in list(pulse._tasks_in_kernel()):
        assert thread.is_alive()
    os.close(os.open(pipe, os.O_WRONLY))
    thread.join()
    os.waitpid(child.value, 0)
    assert str(tasks[0]) not in list(pulse._tasks_in_kernel())
