"""One reward process: a request in, an answer out. A RewardPool starts it.

It imports neither torch nor other parts of Fivefold, but transformers if functions call a judge themselves.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any

from fivefold.reward.code.confine import end_with_parent
from fivefold.reward.code.reward import configure
from fivefold.reward.cpu_limit import TooLongError, within
from fivefold.reward.forms import RewardFunction, call, describe, lists_matter
from fivefold.reward.messages import Messages
from fivefold.reward.rules import resolve
from fivefold.user_code import is_user_code

_LONGEST_ERROR = 4000
"""Number of characters of a traceback that are kept, from its end."""


def main() -> None:
    """Read the settings, load the functions and confirm; then answer requests until the other end is gone.

    The settings are `{"memory_mb": ..., "rewards": [name, ...], "code": limits}`, and the confirmation has the line of each
    user function for the start of a run in `forms`. A request is `{"id": ..., "reward": name, "sample": {...},
    "cpu_seconds": limit or null, "is_trial": ...}`. Its answer is `{"id": ..., "value": number}`, with null if the function
    does not apply, `{"id": ..., "is_late": true}` for a call that took too long, or `{"id": ..., "error": traceback}`.
    """
    messages = Messages(socket.socket(fileno=int(sys.argv[1])))
    # A copy that a function forks must not keep the socket open when this process ends.
    os.register_at_fork(after_in_child=messages.close)
    if sys.platform == "linux":
        # The trainer may be killed while a function hangs here.
        end_with_parent(os.getppid())
    settings = messages.receive()
    assert settings is not None
    limit = settings["memory_mb"] * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    configure(**settings["code"])
    functions: dict[str, RewardFunction] = {}

    def load(names: list[str]) -> None:
        functions.update({name: resolve(name) for name in names if name not in functions})

    def confirm(request: dict[str, Any]) -> dict[str, Any]:
        load(request["rewards"])
        return {
            "value": 0.0,
            "forms": [describe(name, function) for name, function in functions.items() if is_user_code(name)],
        }

    def value(request: dict[str, Any]) -> dict[str, Any]:
        name, scored, seconds = request["reward"], request["sample"], request.get("cpu_seconds")
        load([name])
        if (model := scored.get("reward_model_tokenizer")) is not None:
            scored["reward_model_tokenizer"] = _tokenizer(model)
        if seconds is None:
            answer: dict[str, Any] = {"value": call(name, functions[name], scored)}
            return answer | {"lists_matter": request["is_trial"] and lists_matter(functions[name], scored)}
        try:
            return {"value": within(seconds, lambda: call(name, functions[name], scored))}
        except TooLongError:
            return {"is_late": True}

    messages.send(_answer(confirm, settings))
    while (request := messages.receive()) is not None:
        messages.send(_answer(value, request))


@cache
def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def _answer(work: Callable[[dict[str, Any]], dict[str, Any]], request: dict[str, Any]) -> dict[str, Any]:
    pid, answer = os.getpid(), dict[str, Any](id=request.get("id"))
    try:
        answer |= work(request)
    except BaseException:
        # SystemExit and MemoryError of a user's function cost this sample its reward, like any other error.
        answer["error"] = traceback.format_exc()[-_LONGEST_ERROR:]
    if os.getpid() != pid:
        # This is a copy that the function forked; the original process answers the requests.
        os._exit(0)
    return answer


if __name__ == "__main__":
    main()
