#!/bin/sh
# The demo with ten seeds, side by side on two cores each, the first six also as a CPU without AVX-512 would run it.
# Usage, with `fivefold` on the PATH: sh benchmarks/demo_seeds.sh OUT
set -eu
out=$1
here=$(pwd)
one() { # seed, name, instruction set
  directory=$(mktemp -d)
  ln -s "$here/examples" "$directory/examples"
  cd "$directory"
  begin=$(date +%s)
  SEED=$1 ATEN_CPU_CAPABILITY=$3 timeout 400 taskset -c "$4,$(($4 + 1))" sh examples/demo/demo.sh > log.txt 2>&1 || echo "failed: $(tail -n 1 log.txt)"
  seconds=$(($(date +%s) - begin))
  python3 - "$1" "$2" "$seconds" <<'PYTHON'
import json
import sys

seed, name, seconds = sys.argv[1:]
runs = {}
for run in ("sft", "grpo"):
    with open(f"demo/runs/{run}/metrics.jsonl") as file:
        runs[run] = [json.loads(line) for line in file]
curve = [(row["step"], row["val/arithmetic/mean@4"]) for row in runs["grpo"] if "val/arithmetic/mean@4" in row]
shown = " ".join(f"{value:.2f}" for _, value in curve)
print(f"seed {seed} {name}: sft {runs['sft'][-1]['step']} steps, grpo {curve[-1][0]} steps, {seconds} s; mean@4 {shown}")
PYTHON
}
core=0
for seed in 0 1 2 3 4 5 6 7 8 9; do
  (one $seed native "" $core) >> "$out" 2>&1 &
  core=$((core + 2))
done
for seed in 0 1 2 3 4 5; do
  (one $seed avx2 avx2 $core) >> "$out" 2>&1 &
  core=$((core + 2))
done
wait
