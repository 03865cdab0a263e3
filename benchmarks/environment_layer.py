"""How many steps a second the environment layer takes: environments that sleep, so that what is left is the layer.

`python benchmarks/environment_layer.py [SECONDS]`: 4,096 environments, whose steps sleep for 0.5 to 4 s. Prints the steps a
second, those a second of CPU time of all processes, and how much later than its sleep a step ends.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fivefold.config.environment import EnvironmentConfig
from fivefold.environments.pool import EnvironmentPool, Place

ENVIRONMENTS = 4096
CODE = """
import asyncio
import random


class Sleeper:
    async def reset(self, task, seed):
        self.draws = random.Random(seed)
        return "?"

    async def step(self, message):
        seconds = self.draws.uniform(0.5, 4.0)
        await asyncio.sleep(seconds)
        return {"messages": str(seconds)}
"""


def cpu_seconds() -> float:
    """Return the CPU time of this process and its children."""
    this_process = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (this_process, *this_process.children(recursive=True)))


def main(seconds: float) -> None:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "sleeper.py").write_text(CODE)
        pool = EnvironmentPool(EnvironmentConfig(class_=f"{directory}/sleeper.py:Sleeper", per_worker=ENVIRONMENTS // 8))
        pool.start()
        places = [future.result()[0] for future in [pool.reset({}, seed) for seed in range(ENVIRONMENTS)]]
        ended: SimpleQueue[tuple[Place, float, Any, float]] = SimpleQueue()

        def step(place: Place) -> None:
            begin = time.monotonic()
            future = pool.step(place, {"role": "assistant", "content": "!"}, 60.0)
            future.add_done_callback(lambda done: ended.put((place, begin, done, time.monotonic())))

        for place in places:
            step(place)
        # The first steps begin together, which later ones do not.
        steps, failed, late, begin, cpu = 0, 0, [], time.monotonic() + 5.0, None
        while (now := time.monotonic()) < begin + seconds:
            place, asked, future, end = ended.get()
            step(place)
            if now < begin:
                continue
            cpu = cpu_seconds() if cpu is None else cpu
            steps += 1
            failed += future.exception() is not None
            late.append(end - asked - float(future.result()["messages"]))
        assert cpu is not None
        cores = (cpu_seconds() - cpu) / seconds
        late.sort()
        print(f"{ENVIRONMENTS} environments, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.0f}")
        print(f"{steps / seconds:.0f} steps/s, {steps / seconds / cores:.0f} a core, {failed} failed")
        print(f"later than its sleep: median {late[len(late) // 2]:.3f} s, p99 {late[int(len(late) * 0.99)]:.3f} s")
        pool.close()


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 30.0)
