#!/bin/sh
# Installs a wheel into an empty environment, away from the checkout, and runs the first run of docs/first-run.md there:
#     sh docker/try_wheel.sh dist/fivefold-0.1.0-py3-none-any.whl -c constraints.txt              # CPUs
#     EXTRAS=vllm,ray sh docker/try_wheel.sh dist/fivefold-*.whl -c constraints-gpu.txt            # GPUs: not measured yet
# What follows the wheel are arguments of pip. DIRECTORY: where, and left there. STEPS: of the run. SITE: a site-packages
# directory that the environment sees as well, for a machine that can download nothing and has torch (then with --no-deps).
set -eu

wheel=$(realpath "$1") && shift
page=$(cd "$(dirname "$0")/.." && pwd)/docs/first-run.md
directory=${DIRECTORY:-$(mktemp -d)}
[ -n "${DIRECTORY:-}" ] || trap 'rm -rf "$directory"' EXIT

python3 -m venv "$directory/venv"
if [ -n "${SITE:-}" ]; then
	echo "$SITE" > "$("$directory/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/site.pth"
fi
# Paths among pip's arguments are those of here.
"$directory/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" "fivefold${EXTRAS:+[$EXTRAS]} @ file://$wheel"

cd "$directory"
unset PYTHONPATH
export PATH="$directory/venv/bin:$PATH"
python -c 'import fivefold, sys; sys.exit(not fivefold.__file__.startswith(sys.prefix) and f"not the wheel: {fivefold.__file__}")'
fivefold doctor
# The commands of the page, from its block of shell.
sed -n '/^```sh$/,/^```$/{/^```/d;p}' "$page" | sed "s/trainer.steps=[0-9]*/trainer.steps=${STEPS:-2}/" > first-run.sh
sh -eux first-run.sh
test -s runs/first/report.html
echo "the wheel runs: $(tail -n 1 runs/first/metrics.jsonl | cut -c 1-120)"
