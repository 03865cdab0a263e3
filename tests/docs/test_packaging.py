"""What a user installs: the lines of the pages, the images and the examples are the same, and hold."""

from __future__ import annotations

import copy
import hashlib
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fivefold import __version__
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
    assert [extra.name for extra in EXTRAS] == [name for name in extras if extras[name] and name not in ("all", "dev")]
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
    assert 'srun fivefold train "$@"' in slurm
    [words] = re.findall(r"^    set -- (.*)$", slurm, re.M)
    job = yaml.safe_load((ROOT / "examples/kubernetes/job.yaml").read_text())
    ray = yaml.safe_load((ROOT / "examples/kubernetes/rayjob.yaml").read_text())
    words_by_example = {
        "slurm": ["fivefold", "train", *shlex.split(words)],
        "job": job["spec"]["template"]["spec"]["containers"][0]["command"],
        "rayjob": shlex.split(ray["spec"]["entrypoint"]),
    }
    assert all(command[:2] == ["fivefold", "train"] for command in words_by_example.values())
    return {name: command[2:] for name, command in words_by_example.items()}


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
        mounted = {mount["name"] for container in spec["containers"] for mount in container["volumeMounts"]}
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


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-gpu.txt"])
def test_constraints_are_versions_that_the_project_accepts(name):
    pins = {}
    for line in (ROOT / name).read_text().splitlines():
        if not line.startswith("#"):
            package, version = line.split("==")
            assert pins.setdefault(canonicalize_name(package), version) == version
    wanted = [Requirement(text) for text in PROJECT["dependencies"]]
    extras = [Requirement(text) for extra in EXTRAS for text in PROJECT["optional-dependencies"][extra.name]]
    assert {canonicalize_name(one.name) for one in wanted} <= set(pins)
    for one in [*wanted, *extras]:
        version = pins.get(canonicalize_name(one.name))
        assert version is None or one.specifier.contains(version, prereleases=True), (one, version)
    if name == "constraints-gpu.txt":
        assert {canonicalize_name(extra.package) for extra in EXTRAS} - set(pins) == {"flash-attn-4"}
        page = (ROOT / "docs/install.md").read_text()
        for package, shown in (("torch", "torch"), ("vllm", "vLLM"), ("ray", "Ray"), ("transformers", "transformers")):
            assert f"{shown} {'.'.join(pins[package].split('.')[:2])}" in page


def test_the_address_of_the_repository_stands_in_one_place():
    assert all(url.startswith(PROJECT["urls"]["Source"]) for url in PROJECT["urls"].values())
    account = PROJECT["urls"]["Source"].split("/")[3]
    named = subprocess.run(["git", "grep", "-lI", f"{account}/fivefold"], cwd=ROOT, capture_output=True, text=True).stdout
    # The page is written from it.
    assert named.split() == ["docs/install.md", "pyproject.toml"]


def test_a_tag_is_built_checked_tried_and_published_without_a_token():
    text = (ROOT / ".github/workflows/publish.yml").read_text()
    workflow = yaml.safe_load(text)
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    lines = [line.strip() for step in build["steps"] for line in step.get("run", "").splitlines()]
    order = ["test ", "SOURCE_DATE_EPOCH=", "twine check --strict", "sh docker/try_wheel.sh"]
    assert [start for line in lines for start in order if line.startswith(start)] == order
    assert (publish["needs"], publish["if"]) == ("build", "github.ref_type == 'tag'")
    assert workflow["permissions"] == {"contents": "read"} and publish["permissions"] == {"id-token": "write"}
    assert [step["uses"].partition("@")[0] for step in publish["steps"]] == [
        "actions/download-artifact",
        "pypa/gh-action-pypi-publish",
    ]
    assert "secrets" not in text and "password" not in text
    # The check of the tag finds the version.
    [tag] = [line for line in lines if line.startswith("test ")]
    for name, code in ((f"v{__version__}", 0), ("v9.9.9", 1)):
        environment = os.environ | {"GITHUB_REF_NAME": name}
        assert subprocess.run(["sh", "-c", tag], cwd=ROOT, env=environment, check=False).returncode == code


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_the_chroot_runs_every_instruction_of_an_image(dockerfile):
    script = (ROOT / "docker/try.sh").read_text()
    instructions = set(re.findall(r"^([A-Z]+) ", dockerfile.read_text(), re.M))
    labels = {word for line in re.findall(r"^\t([A-Z |]+)\)", script, re.M) for word in line.split(" | ")}
    assert instructions <= labels
    subprocess.run(["sh", "-n", ROOT / "docker/try.sh"], check=True)
    subprocess.run(["sh", "-n", ROOT / "docker/try_wheel.sh"], check=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, str]:
    """A clone of the last commit after `make wheel`, and what that printed."""
    copy = tmp_path_factory.mktemp("built") / "copy"
    subprocess.run(["git", "clone", "--quiet", ROOT, copy], check=True)
    done = subprocess.run(["make", "wheel", f"PYTHON={sys.executable}"], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return copy, done.stdout


@pytest.mark.slow
def test_a_wheel_comes_out_the_same_with_every_file_of_the_package_and_no_other(built):
    copy, printed = built
    [wheel] = (copy / "dist").glob("*.whl")
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() in printed
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    committed = subprocess.run(["git", "ls-files", "src"], cwd=copy, check=True, capture_output=True, text=True).stdout
    assert names == {name.removeprefix("src/") for name in committed.split()}


@pytest.mark.slow
def test_the_source_archive_builds_the_same_wheel_and_carries_no_tests(built, tmp_path):
    copy, _ = built
    [wheel] = (copy / "dist").glob("*.whl")
    time = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=copy, check=True, capture_output=True, text=True).stdout
    environment = os.environ | {"SOURCE_DATE_EPOCH": time.strip()}
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=copy, env=environment, check=True, stdout=subprocess.DEVNULL)
    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        assert not [name for name in files.getnames() if "/tests" in name or "/examples" in name]
        files.extractall(tmp_path / "source", filter="data")
    [source] = (tmp_path / "source").iterdir()
    line = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, source]
    subprocess.run(line, env=environment, check=True)
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


@pytest.mark.slow
def test_a_wheel_alone_inits_and_trains_in_an_empty_environment(built, tmp_path):
    """With the packages of the CPU image, without the checkout."""
    copy, _ = built
    [wheel] = (copy / "dist").glob("*.whl")
    [torch, _] = pip_lines(ROOT / "docker/Dockerfile.cpu")
    environment = os.environ | {"PIP_RETRIES": "0", "DIRECTORY": str(tmp_path / "away")}
    line = f"sh {ROOT}/docker/try_wheel.sh {wheel} {torch.removeprefix('pip install ')}"
    done = subprocess.run(["sh", "-c", line], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a plain run can start here" in done.stdout and 'the wheel runs: {"step": 2' in done.stdout
    # Tables of other systems and the report's page are files of the wheel.
    script = ROOT / "examples/verl/run_qwen3_8b.sh"
    convert = [tmp_path / "away/venv/bin/fivefold", "convert", "--from", "verl", script]
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    converted = subprocess.run(convert, cwd=tmp_path, env=plain, capture_output=True, text=True)
    assert converted.stdout == script.with_name("run.yaml").read_text(), converted.stderr
    assert (tmp_path / "away/runs/first/report.html").read_text().count("<script") > 0
