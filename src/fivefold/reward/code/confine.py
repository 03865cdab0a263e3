"""Sandboxing that the Linux kernel offers an unprivileged process: Landlock, seccomp, namespaces, limits.

Sources: landlock(7), landlock_restrict_self(2), seccomp(2), Documentation/userspace-api/landlock.rst, the syscall tables of
x86_64 and arm64. All calls go through ctypes, so nothing is compiled.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import signal
import struct
from collections.abc import Callable, Iterable, Sequence

_LIBC = ctypes.CDLL(None, use_errno=True)


_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine -> its column below, and its AUDIT_ARCH."""
_CALLS: dict[str, tuple[int | None, int | None]] = {
    # open files
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "pread64": (17, 67),
    "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    "pipe": (22, None), "pipe2": (293, 59), "ftruncate": (77, 46), "fadvise64": (221, 223), "close_range": (436, 436),
    # files by name, as far as Landlock allows
    "stat": (4, None), "lstat": (6, None), "newfstatat": (262, 79),
    "statx": (332, 291), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "getdents64": (217, 61),
    "getcwd": (79, 17),
    # memory
    "brk": (12, 214), "mmap": (9, 222), "munmap": (11, 215), "mremap": (25, 216), "mprotect": (10, 226),
    "madvise": (28, 233),
    # threads
    "futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293), "sched_yield": (24, 124), "membarrier": (324, 283),
    "gettid": (186, 178), "set_tid_address": (218, 96), "arch_prctl": (158, None), "sched_getaffinity": (204, 123),
    # time, waiting
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "gettimeofday": (96, 169), "time": (201, None), "poll": (7, None), "ppoll": (271, 73), "select": (23, None),
    "pselect6": (270, 72), "setitimer": (38, 103), "getitimer": (36, 102), "alarm": (37, None),
    # its own signals and exit
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "restart_syscall": (219, 128), "exit": (60, 93), "exit_group": (231, 94),
    # its identity and environment
    "getpid": (39, 172), "getppid": (110, 173), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176),
    "getegid": (108, 177), "uname": (63, 160), "sysinfo": (99, 179), "getrandom": (318, 278), "getrusage": (98, 165),
    "times": (100, 153), "getrlimit": (97, 163), "umask": (95, 166),
}  # fmt: skip
"""System calls that a program may make without checks of their arguments; calls that are not here fail with EPERM."""
_CLONE, _CLONE3, _PRLIMIT, _FCNTL = (56, 220), (435, 435), (302, 261), (72, 25)
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)
"""Allowed fcntl commands: duplicating a file and its flags; no signal owner, no locks."""
_CLONE_THREAD = 0x00010000
_OPENS: dict[tuple[int | None, int | None], int] = {(2, None): 1, (257, 56): 2}
"""Calls open and openat -> position of their flags argument."""
_O_TMPFILE = 0o20000000
"""Flag that creates an unnamed file, which the check of a program's directory would not count."""
_EPERM, _ENOSYS = 1, 38


_LOAD, _EQUAL, _AND, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_PR_SET_NO_NEW_PRIVS, _PR_SET_PDEATHSIG = 38, 1


def _instruction(code: int, k: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("HBBI", code, yes, no, k)


def seccomp_filter(machine: str = platform.machine()) -> bytes:
    """Return the BPF program that the kernel runs at each call.

    It allows `_CALLS`, threads but no processes, files with names only, and reading limits.
    """
    column, arch = _MACHINES[machine]
    load, equal, end = _LOAD, _EQUAL, _RETURN
    program = [
        _instruction(load, _ARCH_AT),
        _instruction(equal, arch, 1, 0),
        _instruction(end, _KILL),
        _instruction(load, _NUMBER_AT),
    ]

    def when(number: int, body: Sequence[bytes]) -> None:
        """Return a rule for a call whose arguments decide; `body` ends in a return."""
        program.append(_instruction(equal, number, 0, len(body)))
        program.extend(body)

    # glibc falls back to clone, whose flags are readable here; the flags of clone3 are in memory that a pointer names.
    when(_CLONE3[column], [_instruction(end, _ERRNO | _ENOSYS)])
    when(
        _CLONE[column],
        [
            _instruction(load, _ARGUMENTS_AT),
            _instruction(_AND, _CLONE_THREAD, 0, 1),
            _instruction(end, _ALLOW),
            _instruction(end, _ERRNO | _EPERM),
        ],
    )
    new_limit = _ARGUMENTS_AT + 2 * 8
    when(
        _PRLIMIT[column],
        [
            _instruction(load, new_limit),
            _instruction(equal, 0, 0, 3),
            _instruction(load, new_limit + 4),
            _instruction(equal, 0, 0, 1),
            _instruction(end, _ALLOW),
            _instruction(end, _ERRNO | _EPERM),
        ],
    )
    commands = [_instruction(equal, command, len(_FCNTL_COMMANDS) - i, 0) for i, command in enumerate(_FCNTL_COMMANDS)]
    when(
        _FCNTL[column],
        [
            _instruction(load, _ARGUMENTS_AT + 8),
            *commands,
            _instruction(end, _ERRNO | _EPERM),
            _instruction(end, _ALLOW),
        ],
    )
    for calls, place in _OPENS.items():
        if (number := calls[column]) is not None:
            flags = [_instruction(load, _ARGUMENTS_AT + 8 * place), _instruction(_AND, _O_TMPFILE, 0, 1)]
            when(number, [*flags, _instruction(end, _ERRNO | _EPERM), _instruction(end, _ALLOW)])
    for numbers in _CALLS.values():
        if (number := numbers[column]) is not None:
            when(number, [_instruction(end, _ALLOW)])
    program.append(_instruction(end, _ERRNO | _EPERM))
    return b"".join(program)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _install(bpf: bytes) -> None:
    program = _Program(len(bpf) // 8, bpf)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program))


_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ_FILE, _READ_DIR, _WRITE_FILE, _MAKE_FILE, _TRUNCATE = 1 << 2, 1 << 3, 1 << 1, 1 << 8, 1 << 14
_FILE_RIGHTS = (13, 14, 15, 15, 16)
"""Number of file rights in versions 1 to 5 of Landlock; later versions add none."""


def landlock_version() -> int:
    """Return the kernel's Landlock version; 0 without Landlock."""
    return max(0, int(_LIBC.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)))


def landlock_ruleset(readable: Iterable[str], writable: str) -> int:
    """Return the file of a ruleset: reading below `readable`, creating files in `writable`, and nothing else.

    From Landlock version 4 on, TCP is blocked too; from version 6 on, also abstract Unix sockets and signals to other
    processes.
    """
    version = landlock_version()
    handled = (1 << _FILE_RIGHTS[min(version, 5) - 1]) - 1
    attributes = struct.pack("QQQ", handled, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = _syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(size), 0)
    for path in readable:
        with contextlib.suppress(OSError):
            _allow(ruleset, path, _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0))
    _allow(ruleset, writable, (_READ_FILE | _READ_DIR | _WRITE_FILE | _MAKE_FILE | _TRUNCATE) & handled)
    _allow(ruleset, os.devnull, _READ_FILE | _WRITE_FILE)
    return ruleset


def _allow(ruleset: int, path: str, rights: int) -> None:
    file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        _syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", rights, file), 0)
    finally:
        os.close(file)


_NAMESPACES = 0x10000000 | 0x40000000 | 0x08000000 | 0x04000000
"""Namespaces for users (so that the others need no privilege), networks, System V shared memory and host names."""
_CAPSET = {"x86_64": 126, "aarch64": 91}


def leave_networks() -> bool:
    """Move this process into namespaces without network and shared memory, if the system allows it."""
    return int(_LIBC.unshare(_NAMESPACES)) == 0


def _drop_capabilities() -> None:
    header = struct.pack("Ii", 0x20080522, 0)
    _syscall(_CAPSET[platform.machine()], header, bytes(24))


def _syscall(number: int, *arguments: object) -> int:
    result = int(_LIBC.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _prctl(option: int, *arguments: int) -> None:
    if _LIBC.prctl(option, *map(ctypes.c_ulong, [*arguments, *[0] * (4 - len(arguments))])):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def missing() -> str | None:
    """Return why programs cannot be confined here, or None; without Landlock and seccomp no program runs."""
    if platform.system() != "Linux" or platform.machine() not in _MACHINES:
        return f"it needs Linux on {' or '.join(_MACHINES)}: this is {platform.system()} on {platform.machine()}"
    if not landlock_version():
        return "it needs Landlock (Linux 5.13 or later, and `landlock` in /sys/kernel/security/lsm), which this kernel lacks"
    if _LIBC.prctl(21, 0, 0, 0, 0) < 0:
        return "it needs seccomp, which this kernel lacks"
    return None


def layers() -> str:
    """Describe the confinement that is available here."""
    child = os.fork()
    if not child:
        os._exit(not leave_networks())
    offline = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    network = "a network namespace" if offline else "no network namespace (not allowed here: seccomp alone refuses sockets)"
    return f"Landlock version {landlock_version()}, seccomp, limits, {network}"


def end_with_parent(parent: int) -> None:
    """Let the kernel end this process when its parent ends; end it if that has happened before."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent or parent == 1:
        os._exit(1)


def confinement(ruleset: int, limits: dict[int, int]) -> Callable[[], None]:
    """Return a function that a forked process calls to confine itself permanently.

    It sets limits, drops capabilities, restricts files by `ruleset` and filters system calls. It raises OSError if a part
    fails.
    """
    bpf = seccomp_filter()

    def confine() -> None:
        for kind, value in limits.items():
            _, hard = resource.getrlimit(kind)
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
        _drop_capabilities()
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        _syscall(_LANDLOCK_RESTRICT, ruleset, 0)
        _install(bpf)

    return confine
