"""Whole runs: what may resume what, who may write where, and what a checkpoint needs of the place that it was made in."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.commands import Command, children_of, fivefold, gone, is_free, wait_for
from tests.support.whole_runs import assert_same, make_model, metrics, write_run

RUN = """
policy: {backend: "megatron:d1", tokens_per_micro_batch: 64}
algorithm: {name: grpo, group_size: 4, kl: {coef: 0.1}}
data: {prompts_per_step: 4, max_response_tokens: 8}
trainer: {steps: 2, save_every: 1}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with models, data and a finished run, whose paths are relative to it."""
    root = tmp_path_factory.mktemp("resume")
    make_model(root, rows=16)
    write_run(root, RUN, relative=True)
    here = os.getcwd()
    os.chdir(root)
    try:
        done = fivefold("train", "run.yaml")
    finally:
        os.chdir(here)
    assert done.returncode == 0, done.stderr
    return root


@pytest.fixture(autouse=True)
def _in_root(root, monkeypatch):
    monkeypatch.chdir(root)


def test_a_change_that_decides_the_curve_is_refused_until_it_is_accepted(root):
    shutil.copytree("runs/base", "runs/changed")
    before = {path: path.read_bytes() for path in Path("runs/changed").rglob("*") if path.is_file()}
    changes = ["trainer.run_dir=runs/changed", "policy.optimizer.lr=0.01", "trainer.steps=3", "trainer.save_every=0"]
    refused = fivefold("train", "run.yaml", *changes)
    assert refused.returncode == 2
    assert "policy.optimizer.lr: 0.001 -> 0.01" in refused.stderr and "Traceback" not in refused.stderr
    assert "trainer.accept_changes=[policy.optimizer.lr]" in refused.stderr
    after = {path: path.read_bytes() for path in Path("runs/changed").rglob("*") if path.is_file() and path.name != "lock"}
    assert after.items() <= before.items(), "a run that is refused changes nothing"
    done = fivefold("train", "run.yaml", *changes, "trainer.accept_changes=[policy.optimizer.lr]")
    assert done.returncode == 0, done.stderr
    assert "changed since then, accepted: policy.optimizer.lr: 0.001 -> 0.01" in done.stdout
    harmless = "without effect on what is learned: trainer.steps: 2 -> 3; trainer.save_every: 1 -> 0"
    assert f"changed since then, {harmless}" in done.stdout
    assert [row["step"] for row in metrics(root, "changed")] == [1, 2, 3]


def test_a_new_kl_coefficient_replaces_the_adapted_one_on_resume(root):
    """Steps 3 to 5 follow a target: 3 begins with the run's coefficient, 4 with the adapted one, and 5 with another."""
    shutil.copytree("runs/base", "runs/adapted")
    changes = ["trainer.run_dir=runs/adapted", "trainer.accept_changes=[algorithm.kl]", "algorithm.kl.target=0.5"]
    for steps, more in ((3, []), (4, []), (5, ["algorithm.kl.coef=0.3"])):
        done = fivefold("train", "run.yaml", *changes, *more, f"trainer.steps={steps}")
        assert done.returncode == 0, done.stderr
    first, adapted, other = (row["policy/kl_coef"] for row in metrics(root, "adapted")[2:])
    assert (first, other) == (0.1, 0.3) and 0.09 < adapted < 0.1


def test_two_runs_do_not_meet_in_a_directory(root):
    first = Command("train", "run.yaml", "trainer.run_dir=runs/shared", "trainer.steps=100000", "trainer.save_every=0")
    rows = root / "runs/shared/metrics.jsonl"
    wait_for(rows.is_file, first)
    second = fivefold("train", "run.yaml", "trainer.run_dir=runs/shared")
    assert second.returncode == 2
    assert re.search(
        rf"runs/shared is in use by process {first.pid} on {re.escape(socket.gethostname())} since \d{{4}}-", second.stderr
    ), second.stderr
    everyone = children_of(first.pid)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    wait_for(lambda: gone(everyone) and is_free(root / "runs/shared"))
    third = fivefold("train", "run.yaml", "trainer.run_dir=runs/shared", "trainer.steps=1")
    assert third.returncode == 0, third.stderr
    assert len(list(root.glob("runs/shared/superseded-1/metrics.jsonl"))) == 1, "rows of a run without a checkpoint are kept"


def test_a_run_is_exported_from_another_directory(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = fivefold("export", root / "runs/base/checkpoints/step-000002", "out")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (root / "model/tokenizer.json").read_bytes()


def add_commit(cache: Path, model: Path, commit: str, scale: float) -> None:
    """A commit of the hub's cache, as huggingface_hub lays it out, with weights that are `scale` times those of `model`."""
    repository = cache / "models--someone--tiny"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir(exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    for file in model.iterdir():
        blob = repository / "blobs" / f"{commit}-{file.name}"
        if file.name == "model.safetensors":
            save_file({name: tensor * scale for name, tensor in load_file(file).items()}, blob, metadata={"format": "pt"})
        else:
            shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    (repository / "refs/main").write_text(commit)


def with_a_hub_of_files():
    """huggingface_hub read its environment when it was imported."""
    from huggingface_hub import constants

    constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = os.environ["HF_HUB_CACHE"], True


def offline(*arguments: object) -> subprocess.CompletedProcess[str]:
    return Command(*arguments, hook=with_a_hub_of_files).finish()


def test_a_model_of_the_hub_stays_at_the_commit_that_the_run_began_with(root, tmp_path, monkeypatch):
    """The reference is read again on resume: by then the hub has other weights. As the run that was not interrupted."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    first, second = "1" * 40, "2" * 40
    add_commit(tmp_path / "hub", root / "model", first, 1.0)
    begun = offline("train", "run.yaml", "trainer.run_dir=runs/hub", "model.path=someone/tiny", "trainer.steps=1")
    assert begun.returncode == 0, begun.stderr
    add_commit(tmp_path / "hub", root / "model", second, 1.5)
    done = offline("train", "run.yaml", "trainer.run_dir=runs/hub", "model.path=someone/tiny")
    assert done.returncode == 0, done.stderr
    assert_same(metrics(root, "hub"), metrics(root, "base"))
    state = json.loads((root / "runs/hub/checkpoints/step-000002/state.json").read_text())
    assert state["commits"] == {"someone/tiny": first}
    # Another run reads what is there now; the checkpoint's own commit goes with what is exported.
    other = offline("train", "run.yaml", "trainer.run_dir=runs/hub-2", "model.path=someone/tiny")
    assert other.returncode == 0, other.stderr
    assert metrics(root, "hub-2")[0]["policy/entropy"] != pytest.approx(metrics(root, "base")[0]["policy/entropy"], rel=1e-3)
    exported = offline("export", root / "runs/hub/checkpoints/step-000001", tmp_path / "out")
    assert exported.returncode == 0, exported.stderr
    weights, before = load_file(tmp_path / "out/model.safetensors"), load_file(root / "model/model.safetensors")
    assert all(torch.allclose(weights[name], tensor, atol=5e-3) for name, tensor in before.items())
