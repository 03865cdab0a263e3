"""One reward process: a request in, an answer out. A RewardPool starts it.

It imports neither torch nor other parts of Fivefold, but transformers if functions call a judge themselves.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
import traceback
from functools import cache
from typing import Any

from fivefold.reward.code.reward import configure
from fivefold.reward.cpu_limit import TooLongError, within
from fivefold.reward.messages import Messages
from fivefold.reward.rules import RewardFunction, call, resolve

_LONGEST_ERROR = 4000
"""Number of characters of a traceback that are kept, from its end."""
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Read the settings, load the functions and confirm; then answer requests until the other end is gone.

    The settings are `{"memory_mb": ..., "rewards": [name, ...], "offered": [parameter, ...], "code": limits}`. A request is
    `{"id": ..., "reward": name, "sample": {...}, "cpu_seconds": limit or null}`. Its answer is `{"id": ..., "value":
    number}`, with null for a call that took too long, or `{"id": ..., "error": traceback}`.
    """
    messages = Messages(socket.socket(fileno=int(sys.argv[1])))
    # A copy that a function forks must not keep the socket open when this process ends.
    os.register_at_fork(after_in_child=messages.close)
    _end_with_parent()
    settings = messages.receive()
    assert settings is not None
    limit = settings["memory_mb"] * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    configure(**settings["code"])
    functions: dict[str, RewardFunction] = {}

    def load(names: list[str], offered: tuple[str, ...]) -> float:
        functions.update({name: resolve(name, offered) for name in names if name not in functions})
        return 0.0

    def value(request: dict[str, Any]) -> float | None:
        name, offered, seconds = request["reward"], request["sample"], request.get("cpu_seconds")
        load([name], tuple(offered))
        if (model := offered.get("reward_model_tokenizer")) is not None:
            offered["reward_model_tokenizer"] = _tokenizer(model)
        if seconds is None:
            return call(functions[name], offered)
        try:
            return within(seconds, lambda: call(functions[name], offered))
        except TooLongError:
            return None

    messages.send(_answer(lambda request: load(request["rewards"], tuple(request["offered"])), settings))
    while (request := messages.receive()) is not None:
        messages.send(_answer(value, request))


@cache
def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def _answer(work: Any, request: dict[str, Any]) -> dict[str, Any]:
    own, answer = os.getpid(), {"id": request.get("id")}
    try:
        answer["value"] = work(request)
    except BaseException:
        # SystemExit and MemoryError of a user's function cost this sample its reward, like any other error.
        answer["error"] = traceback.format_exc()[-_LONGEST_ERROR:]
    if os.getpid() != own:
        # This is a copy that the function forked; the original process answers the requests.
        os._exit(0)
    return answer


def _end_with_parent() -> None:
    """Let the kernel end this process if the trainer is killed while a function hangs here."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent or parent == 1:
            sys.exit(1)


if __name__ == "__main__":
    main()
