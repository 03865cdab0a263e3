"""Every layout of tests/support/layout_cases.py against one process: `make test-layouts` prints the table and fails if one differs."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.support.cluster import Cluster
from tests.support.layout_cases import MODELS
from tests.support.tiny_models import make_model
from tests.support.two_steps import BOUNDS, difference, expected, policy_of, run_step
from tests.support.zygote import zygote


def main(wanted: list[str]) -> int:
    cluster, failures, rows = Cluster(), 0, 0
    print("| model | layout | tokens a micro-batch | loss | gradient norm | parameters | |")
    print("|---|---|---|---|---|---|---|")
    for name, cases in MODELS.items():
        if wanted and name not in wanted:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            directory = make_model(name, Path(scratch))
            for case in cases:
                for budget in (1000, 32):
                    policy, begin = policy_of(name, case, budget), time.monotonic()
                    try:
                        results = run_step(cluster, case.layout, directory, policy)
                        differences = difference(results, expected(directory, policy))
                        equal = all(value <= bound for value, bound in zip(differences, BOUNDS, strict=True))
                        told = " | ".join(f"{value:.1e}" for value in differences)
                    except Exception as error:
                        equal, told = False, f"{str(error).strip().splitlines()[-1]} | |"
                    failures, rows = failures + (not equal), rows + 1
                    seconds = time.monotonic() - begin
                    print(f"| {name} | {case} | {budget} | {told} | {'equal' if equal else 'DIFFERS'} |", flush=True)
                    print(f"  {seconds:.1f} s", file=sys.stderr, flush=True)
    zygote.close()
    print(
        f"\n{rows - failures} of {rows} equal the step of one process: loss {BOUNDS[0]:g}, norm {BOUNDS[1]:g}, parameters {BOUNDS[2]:g}"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
