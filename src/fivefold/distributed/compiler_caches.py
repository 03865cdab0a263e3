"""Directories in which compilers keep machine code between runs: in the user's own cache, and of no other user."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

from fivefold.distributed.scratch import scratch_directory
from fivefold.files import user_cache, users_umask

_FLASH_ATTENTION = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
_IS_KEPT = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
VARIABLES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm",
    _FLASH_ATTENTION: "flash-attention",
}  # fmt: skip
"""Environment variable that a library reads -> its directory in ours."""


def use_compiler_caches(environment: MutableMapping[str, str] = os.environ) -> str:
    """Set the variables of compiler caches that the user has not set; return why the user's cache is not used, or "".

    Processes load machine code from these directories, so one that another user can write to is not used. The process then
    compiles into a directory of its own, which is removed after it. Servers get the variables with the environment.
    """
    missing = [name for name in VARIABLES if name not in environment]
    if not missing:
        return ""
    home, fault = _home()
    for name in missing:
        environment[name] = str(home / VARIABLES[name])
    return fault


@contextmanager
def kept_flash_attention(architecture: str) -> Iterator[None]:
    """Let FlashAttention 4, imported in this context, keep the kernels that it compiles, apart for each GPU architecture.

    By default the library keeps none, and it names some of them without the architecture. It reads its variables at its
    import; they are set back afterwards, since vLLM has a copy of the library that reads them too. A user's own "0" stays.
    Where files cannot be locked, as on some cluster file systems, nothing is kept: the library would end the run.
    """
    before = {name: os.environ.get(name) for name in (_FLASH_ATTENTION, _IS_KEPT)}
    place = before[_FLASH_ATTENTION]
    if place and _can_lock(directory := Path(place) / architecture):
        os.environ[_FLASH_ATTENTION] = str(directory)
        os.environ.setdefault(_IS_KEPT, "1")
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _can_lock(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _home() -> tuple[Path, str]:
    """Return the directory to use, and what is wrong with the one in the user's cache."""
    try:
        path = user_cache("compiled")
        with users_umask():
            path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        fault = _fault(path)
    except (OSError, RuntimeError) as error:
        # Path.home() raises RuntimeError for a user without a home directory.
        fault = f"the user's cache cannot be used ({error})"
    if not fault:
        return path, ""
    text = "compiled code must be in a directory that only its user can write to"
    return (
        scratch_directory(),
        f"{text}: {fault}; this process compiles from scratch; set XDG_CACHE_HOME to another directory",
    )


def _fault(path: Path) -> str:
    """Return why another user may put code into the directory, or an empty string."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return f"{path} is not a directory"
    if status.st_uid != os.geteuid():
        return f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} has mode {stat.S_IMODE(status.st_mode):04o}, in which others may write; remove it"
    return ""
