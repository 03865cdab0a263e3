"""What a user installs: the lines of the pages, the images and the examples are the same, and hold."""

from __future__ import annotations

import copy
import hashlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from fivefold.config import RunConfig
from fivefold.config.packages import EXTRAS
from fivefold.plan.check import check
from tests.support.kubernetes_api import faults

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))


def pip_lines(dockerfile: Path) -> list[str]:
    return re.findall(r"^RUN (pip install .*)$", dockerfile.read_text(), re.M)


def test_every_extra_is_known_to_the_doctor_and_part_of_all():
    extras = PROJECT["optional-dependencies"]
    assert [extra.name for extra in EXTRAS] == [name for name in extras if name not in ("all", "dev")]
    assert extras["all"] == [f"fivefold[{','.join(extra.name for extra in EXTRAS)}]"]
    for extra in EXTRAS:
        assert extras[extra.name][0].startswith(extra.package)
        assert f"`fivefold[{extra.name}]`" in (ROOT / "docs/install.md").read_text()


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_images_are_made_of_the_lines_of_the_page(dockerfile):
    page = (ROOT / "docs/install.md").read_text().splitlines()
    lines = pip_lines(dockerfile)
    assert lines and all(f"    {line}" in page for line in lines)
    copied = re.findall(r"^COPY (.*) \S+$", dockerfile.read_text(), re.M)
    assert all((ROOT / name).exists() for names in copied for name in names.split())
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert all(f"!{name}" in allowed for names in copied for name in names.split())


def test_compose_builds_the_dockerfiles():
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    assert {service["build"]["dockerfile"] for service in services.values()} == {
        f"docker/{path.name}" for path in DOCKERFILES
    }


def commands() -> dict[str, list[str]]:
    """Of each example the words of its `fivefold train`."""
    slurm = (ROOT / "examples/slurm/train.sbatch").read_text()
    [words] = re.findall(r"^srun fivefold train (.*)$", slurm, re.M)
    job = yaml.safe_load((ROOT / "examples/kubernetes/job.yaml").read_text())
    ray = yaml.safe_load((ROOT / "examples/kubernetes/rayjob.yaml").read_text())
    own = {
        "slurm": ["fivefold", "train", *shlex.split(words)],
        "job": job["spec"]["template"]["spec"]["containers"][0]["command"],
        "rayjob": shlex.split(ray["spec"]["entrypoint"]),
    }
    assert all(found[:2] == ["fivefold", "train"] for found in own.values())
    return {name: found[2:] for name, found in own.items()}


GPUS = {"slurm": 16, "job": 8, "rayjob": 16}
NOT_HERE = ("no file at", "not installed", "GPUs on this machine", "no such file")


@pytest.mark.parametrize("name", GPUS)
def test_commands_of_the_examples_lack_nothing_but_their_machines(monkeypatch, name):
    monkeypatch.chdir(ROOT)
    words = commands()[name]
    config = RunConfig.from_yaml(words[0], words[1:]) if words[0].endswith(".yaml") else RunConfig.from_overrides(words)
    assert config.layout.world_size == GPUS[name]
    assert [error for error in check(config).errors if not any(part in error for part in NOT_HERE)] == []


def test_examples_ask_for_as_many_gpus_as_their_layout():
    slurm = (ROOT / "examples/slurm/train.sbatch").read_text()
    nodes, tasks, gpus = (
        int(re.search(rf"--{key}=(\d+)", slurm)[1]) for key in ("nodes", "ntasks-per-node", "gpus-per-node")
    )
    assert nodes * tasks == nodes * gpus == GPUS["slurm"]
    subprocess.run(["bash", "-n", ROOT / "examples/slurm/train.sbatch"], check=True)
    job = yaml.safe_load((ROOT / "examples/kubernetes/job.yaml").read_text())["spec"]["template"]["spec"]
    assert job["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == GPUS["job"]
    ray = yaml.safe_load((ROOT / "examples/kubernetes/rayjob.yaml").read_text())["spec"]["rayClusterSpec"][
        "workerGroupSpecs"
    ][0]
    worker = ray["template"]["spec"]["containers"][0]
    assert ray["replicas"] * worker["resources"]["limits"]["nvidia.com/gpu"] == GPUS["rayjob"]
    for spec in (job, ray["template"]["spec"]):
        mounted = {mount["name"] for each in spec["containers"] for mount in each["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}


@pytest.mark.parametrize(
    ("name", "kind", "version"), [("job", "JOB", "batch/v1 Job"), ("rayjob", "RAY_JOB", "ray.io/v1 RayJob")]
)
def test_kubernetes_would_know_every_field(name, kind, version):
    tree = yaml.safe_load((ROOT / f"examples/kubernetes/{name}.yaml").read_text())
    assert f"{tree['apiVersion']} {tree['kind']}" == version
    assert faults(tree, kind) == []
    # A pod of a job that is restarted always would never be done.
    assert kind != "JOB" or tree["spec"]["template"]["spec"]["restartPolicy"] in ("OnFailure", "Never")
    planted = copy.deepcopy(tree)
    spec = (
        planted["spec"]["template"]
        if kind == "JOB"
        else planted["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]
    )
    container = spec["spec"]["containers"][0]
    container["workdir"] = container.pop("workingDir")
    container["volumeMounts"][0].pop("mountPath")
    container["resources"]["limits"]["memory"] = "32 GB"
    assert [fault.rpartition("].")[2].partition(" ")[0] for fault in faults(planted, kind)] == [
        "workdir", "resources.limits[memory]", "mountPath",
    ]  # fmt: skip


COMPOSE = {
    "image": str, "build": dict, "volumes": list, "shm_size": str, "ulimits": dict, "deploy": dict, "command": list,
    "environment": dict, "working_dir": str, "ipc": str,
}  # fmt: skip
"""Keys of a service, of those that the Compose specification has."""


def test_compose_has_keys_of_its_specification():
    tree = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
    assert set(tree) <= {"name", "services", "volumes", "networks"}
    for service in tree["services"].values():
        assert all(isinstance(value, COMPOSE[key]) for key, value in service.items())
        assert set(service["build"]) <= {"context", "dockerfile", "args", "target"}
        assert re.fullmatch(r"\d+(b|kb|mb|gb)", service["shm_size"])
        # A path would begin where the file lies, and not where the user is.
        assert service["volumes"] == ["${PWD:-..}:/work", "cache:/root/.cache"] and "cache" in tree["volumes"]
    [device] = tree["services"]["cuda"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia" and "gpu" in device["capabilities"]


@pytest.mark.slow
def test_wheels_come_out_the_same_and_carry_their_types(tmp_path):
    """Built out of the last commit."""
    subprocess.run(["git", "clone", "--quiet", ROOT, tmp_path / "copy"], check=True)
    done = subprocess.run(
        ["make", "wheel", f"PYTHON={sys.executable}"], cwd=tmp_path / "copy", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    [wheel] = (tmp_path / "copy/dist").glob("*.whl")
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() in done.stdout
    names = zipfile.ZipFile(wheel).namelist()
    assert "fivefold/py.typed" in names and not [name for name in names if name.startswith("tests")]


@pytest.mark.slow
def test_the_lines_of_the_cpu_image_make_an_environment_that_can_run(tmp_path):
    """In a clean environment, as the image would be but for its Python."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": f"{tmp_path}/venv/bin:{os.environ['PATH']}", "PIP_RETRIES": "0"}
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(["cp", "-r", ROOT / "src", source], check=True)
    for line in pip_lines(ROOT / "docker/Dockerfile.cpu"):
        subprocess.run(["bash", "-c", line], cwd=source, env=environment, check=True)
    done = subprocess.run(["fivefold", "doctor"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a plain run can start here" in done.stdout
