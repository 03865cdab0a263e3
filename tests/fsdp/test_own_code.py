"""Models whose repositories have code of their own, which runs with `model.trust_remote_code` only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fivefold.config import RunConfig
from fivefold.config.models_read import models_read
from tests.support.commands import fivefold
from tests.support.tiny_models import make_model as make_model_of
from tests.support.whole_runs import make_model, train, write_run

RUN = """
policy: {backend: "fsdp:d1", tokens_per_micro_batch: 64}
algorithm: {name: grpo, group_size: 2}
data: {prompts_per_step: 4, max_response_tokens: 8}
trainer: {steps: 1, save_every: 1}
"""
CONFIG = """
from pathlib import Path
from transformers import {0}Config
class OwnConfig({0}Config):
    model_type = "{1}"
(Path("{2}") / "config-ran").touch()
"""
MODEL = """
from pathlib import Path
from transformers import {0}ForCausalLM
from .own_config import OwnConfig
class OwnForCausalLM({0}ForCausalLM):
    config_class = OwnConfig
(Path("{2}") / "model-ran").touch()
"""


def with_own_code(directory: Path, prefix: str, family: str) -> Path:
    """Give a model's directory code of its own and this `model_type`."""
    traces = directory.parent / "traces"
    traces.mkdir(exist_ok=True)
    (directory / "own_config.py").write_text(CONFIG.format(prefix, family, traces))
    (directory / "own_model.py").write_text(MODEL.format(prefix, family, traces))
    config = json.loads((directory / "config.json").read_text())
    names = {"AutoConfig": "own_config.OwnConfig", "AutoModelForCausalLM": "own_model.OwnForCausalLM"}
    config |= {"model_type": family, "architectures": ["OwnForCausalLM"], "auto_map": names}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def traces(root: Path) -> list[str]:
    """Names of the files that a repository's code has written when it ran."""
    return sorted(path.name for path in (root / "traces").iterdir())


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    make_model(tmp_path)
    directory = make_model_of("gemma2", tmp_path / "own", vocab_size=64)
    for file in (tmp_path / "model").glob("*token*"):
        shutil.copy(file, directory / file.name)
    with_own_code(directory, "Gemma2", "own_family")
    write_run(tmp_path, RUN)
    return tmp_path


def test_code_of_a_model_runs_only_with_the_key_and_then_it_trains(root):
    path = f"model.path={root}/own"
    for command in ("check", "train"):
        done = fivefold(command, root / "run.yaml", path)
        text = done.stdout + done.stderr
        assert done.returncode and "model.trust_remote_code must be true to run the code in" in text, text
        assert "transformers has no family own_family" in text
    assert not traces(root)
    trusted = path, "model.trust_remote_code=true"
    done = fivefold("check", root / "run.yaml", *trusted)
    assert not done.returncode, done.stdout + done.stderr
    assert not traces(root), "check reads files only"
    rows, _ = train(root, "trusted", *trusted)
    assert len(rows) == 1 and rows[0]["policy/grad_norm"] > 0
    assert traces(root) == ["config-ran", "model-ran"]
    done = fivefold("export", root / "runs/trusted", root / "exported")
    assert not done.returncode, done.stdout + done.stderr
    assert (root / "exported/own_model.py").is_file()


def test_the_model_class_of_a_family_that_has_a_file_here_never_runs(root):
    """Its configuration may, when transformers loads the tokenizer of the same repository."""
    with_own_code(root / "model", "Qwen3", "qwen3")
    rows, _ = train(root, "known", "model.trust_remote_code=true")
    assert len(rows) == 1 and "model-ran" not in traces(root)


def test_a_family_that_neither_transformers_nor_the_repository_has_is_refused(root):
    config = json.loads((root / "own/config.json").read_text())
    del config["auto_map"]
    (root / "own/config.json").write_text(json.dumps(config))
    done = fivefold("check", root / "run.yaml", f"model.path={root}/own", "model.trust_remote_code=true")
    assert done.returncode and "model.path: the installed transformers has no family own_family" in done.stderr


def test_code_of_every_repository_is_downloaded_with_the_key_only():
    words = ["model.path=a/model", "data.train=[d.parquet]", "critic.path=a/critic", "algorithm.name=ppo"]
    for key, has_code in (("false", False), ("true", True)):
        files = models_read(RunConfig.from_overrides([*words, f"model.trust_remote_code={key}"]))
        assert {"a/model", "a/critic"} <= set(files)
        assert all(("*.py" in patterns) == has_code for patterns in files.values())
