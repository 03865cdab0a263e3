"""One reward process: a JSON line in, a JSON line out. Started by RewardPool; imports neither torch nor our other parts."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import traceback

from fivefold.reward.rules import RewardFunction, call, resolve

_LONGEST_ERROR = 4000
"""Characters of a traceback, from its end."""


def main() -> None:
    """Say that it is there, then answer requests `{"rewards": [name, ...], "sample": {...}}` until the input ends."""
    limit, seconds = int(sys.argv[1]) * 2**20, float(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # What a user's function prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    functions: dict[str, RewardFunction] = {}
    answers.write("{}\n")
    answers.flush()
    for line in sys.stdin:
        request = json.loads(line)
        # If the trainer is killed while a function hangs here, nobody ends this process: the kernel then does.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds + 60)
        try:
            values = {}
            for name in request["rewards"]:
                if name not in functions:
                    functions[name] = resolve(name)
                values[name] = call(functions[name], request["sample"])
            answer: dict[str, object] = {"values": values}
        except BaseException:
            # SystemExit and MemoryError of a user's function cost this sample its reward, like any other fault.
            answer = {"error": traceback.format_exc()[-_LONGEST_ERROR:]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        with contextlib.suppress(BrokenPipeError):
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
