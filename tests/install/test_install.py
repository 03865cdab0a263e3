"""The lines with which users of other systems install, each in an environment of its own (`make test-install`).

Trinity-RFT's page begins with conda or venv, which give the Python; all packages are pip's. SkyRL's page is for uv. torch is
its build for CPUs, from the directory that PIP_FIND_LINKS names: that of PyPI brings gigabytes of CUDA.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.install
ROOT = Path(__file__).resolve().parents[2]
PINS = (ROOT / "constraints.txt").read_text()
TORCH = re.search(r"^torch==.*$", PINS, re.M)[0] + "+cpu"
CUDA = re.compile(r"^(nvidia-|cuda-|triton$)")
Shell = Callable[..., str]


@pytest.fixture
def checkout(tmp_path):
    """A copy of what git has: installing leaves files in a checkout."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode()
    for name in filter(lambda name: name and (ROOT / name).is_file(), names.split("\0")):
        (tmp_path / "fivefold" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "fivefold" / name)
    return tmp_path / "fivefold"


@pytest.fixture
def shell(checkout) -> Shell:
    """Runs a line of a page in the checkout with its `.venv`, and returns what it printed; packages are of one time."""
    pins = checkout.parent / "pins.txt"
    pins.write_text(PINS.replace(TORCH.removesuffix("+cpu"), TORCH))
    others = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX")
    # A variable of uv may name another environment to install into.
    kept = {name: value for name, value in os.environ.items() if name not in others and not name.startswith("UV_")}
    path = f"{checkout}/.venv/bin{os.pathsep}{os.environ['PATH']}"
    variables = {
        "PIP_CONSTRAINT": str(pins),
        "UV_CONSTRAINT": str(pins),
        "UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", ""),
    }
    environment = {**kept, **variables, "PATH": path, "VIRTUAL_ENV": f"{checkout}/.venv"}

    def run(line: str, code: int = 0) -> str:
        done = subprocess.run(
            ["bash", "-c", line], cwd=checkout, env=environment, capture_output=True, text=True, timeout=1500
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def works(shell: Shell) -> bool:
    """All modules that a run imports are there, and the command runs, with torch for CPUs."""
    assert shell("python -c 'import sys; print(sys.prefix)'").strip() == shell("echo $VIRTUAL_ENV").strip()
    shell("cd / && python -c 'import fivefold.build, fivefold.cli, fivefold_dialects.skyrl, megatron.core'")
    shell("cd / && fivefold data arithmetic --limit 64 --out $VIRTUAL_ENV/sums && test -f $VIRTUAL_ENV/sums/train.parquet")
    assert shell("python -c 'import torch; print(torch.__version__)'").strip() == TORCH.partition("==")[2]
    return True


def test_pip_installs_the_checkout_with_the_extra_that_trinity_names(shell):
    shell(f"{sys.executable} -m venv .venv")
    output = shell(r"pip install -e .\[megatron\]")
    assert works(shell) and "does not provide the extra" not in output
    assert not [line for line in shell("pip list --format=freeze").splitlines() if CUDA.match(line.partition("==")[0])]
    # Nothing is compiled: its flash-attn and Apex are not needed.
    assert not re.search("flash-attn|apex", shell("pip list"))


def test_uv_pip_installs_the_package_with_the_extra_that_trinity_names(shell):
    shell(f"uv venv --python {sys.executable} .venv")
    output = shell("uv pip install '.[megatron]'")
    assert works(shell) and "does not have an extra" not in output


def test_uv_sync_installs_the_groups_that_skyrl_names(shell, checkout):
    """The lock is what a user gets; of what it chose for CUDA, torch alone is replaced and the rest is left out."""
    shell(f"uv venv --python {sys.executable} .venv && uv lock")
    locked = {package["name"] for package in tomllib.loads((checkout / "uv.lock").read_text())["package"]}
    assert {"vllm", "ray", "mbridge", "megatron-core"} <= locked
    left_out = " ".join(f"--no-install-package {name}" for name in sorted(locked) if name == "torch" or CUDA.match(name))
    shell(f"uv sync --frozen {left_out}")
    shell(f"uv sync --frozen --group mcore {left_out}")
    shell(f"uv pip install --no-deps {TORCH}")
    assert works(shell)
    assert "vllm" in shell("uv sync --frozen --group flashrl --dry-run") and "vllm" not in shell("uv pip list")


def test_a_python_that_is_too_old_is_refused_by_the_version_that_it_needs(shell):
    output = shell("uv pip compile --python-version 3.10 pyproject.toml", 1)
    assert re.search(r"Python.*3\.10.*Python\s*>=\s*3\.11", output, re.S), output
