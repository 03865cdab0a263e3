"""`export` and `eval` of a run: its latest checkpoint, the type of the weights, the hub's card and upload."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from fivefold.checkpoint.export import in_dtype
from tests.support.commands import fivefold, program, python
from tests.support.hub import serving
from tests.support.whole_runs import make_model, train, write_run

RUN = """
policy: {backend: "megatron:d1", tokens_per_micro_batch: 64}
algorithm: {name: grpo, group_size: 4}
data: {val: [$ROOT/data/test.parquet], prompts_per_step: 8, max_response_tokens: 12}
eval: {max_prompts: 6}
trainer: {steps: 2, save_every: 1}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A run in float32 of a model whose config.json says bfloat16, as most published ones do."""
    root = tmp_path_factory.mktemp("export")
    make_model(root)
    file = root / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "bfloat16"}))
    (root / "model/README.md").write_text("---\nlicense: apache-2.0\n---\n# Tiny\n")
    write_run(root, RUN)
    train(root, "base")
    return root


def export(root: Path, out: str, *options: str):
    done = fivefold("export", root / "runs/base", root / out, *options)
    assert done.returncode == 0, done.stderr
    return load_file(root / out / "model.safetensors"), json.loads((root / out / "config.json").read_text()), done.stdout


def test_a_run_is_exported_from_its_latest_checkpoint_in_the_model_s_own_type(root):
    exported, config, output = export(root, "own")
    assert f"{root}/runs/base/checkpoints/step-000002 is the latest checkpoint of {root}/runs/base" in output
    assert "in 1 file, bfloat16 (trained in float32)" in output
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16} and config["dtype"] == "bfloat16"
    whole, config, output = export(root, "whole", "--dtype", "float32")
    assert {tensor.dtype for tensor in whole.values()} == {torch.float32} and config["dtype"] == "float32"
    # What is written is what was trained, rounded once.
    assert all(torch.equal(tensor.bfloat16(), exported[name]) for name, tensor in whole.items())
    first = fivefold("export", root / "runs/base/checkpoints/step-000001", root / "first", "--dtype", "float32")
    assert first.returncode == 0, first.stderr
    assert not torch.equal(load_file(root / "first/model.safetensors")["model.norm.weight"], whole["model.norm.weight"])


EXPORT_AND_TRAIN = """
from pathlib import Path
from fivefold import RunConfig, export, train

if __name__ == "__main__":
    root = Path({root!r})
    export(root / "runs/base", root / "before")
    train(RunConfig.from_yaml(root / "run.yaml", [f"trainer.run_dir={{root}}/runs/after", "policy.backend=megatron:d2"]))
"""


def test_a_program_that_exports_a_model_trains_afterwards_on_all_ranks(root, tmp_path):
    (tmp_path / "program.py").write_text(EXPORT_AND_TRAIN.format(root=str(root)))
    done = python(tmp_path / "program.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([*(root / "runs/after/checkpoints/step-000002/rng").iterdir()]) == 2


def test_an_export_loads_in_transformers_in_the_type_that_it_names(root):
    import transformers

    export(root, "loaded")
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "loaded", dtype="auto")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_router_s_bias_stays_in_float32():
    """A step of it is smaller than what bfloat16 tells apart."""
    weights = [("model.layers.1.mlp.gate.e_score_correction_bias", torch.ones(4)), ("model.norm.weight", torch.ones(4))]
    assert [tensor.dtype for _, tensor in in_dtype(weights, "bfloat16")] == [torch.float32, torch.bfloat16]


def test_a_run_without_a_checkpoint_is_told_when_it_writes_one(tmp_path):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    done = fivefold("export", tmp_path / "run", tmp_path / "out")
    assert done.returncode == 2
    assert "is a run without a checkpoint: it writes the first after trainer.save_every steps" in done.stderr


def test_eval_of_a_run_prints_only_json_and_says_which_checkpoint(root, tmp_path):
    done = fivefold("eval", root / "runs/base", "eval.max_prompts=4")
    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout)
    assert numbers["checkpoint"] == f"{root}/runs/base/checkpoints/step-000002" and "val/arithmetic/accuracy" in numbers
    assert f"step-000002 is the latest checkpoint of {root}/runs/base" in done.stderr
    # No summary of a training, which does not happen.
    assert not any(word in done.stdout + done.stderr for word in ("layout   ", "batch    ", "on the fullest rank"))
    moved = tmp_path / "moved"
    shutil.copytree(root / "runs/base", moved)
    again = fivefold("eval", moved, "eval.max_prompts=4")
    assert json.loads(again.stdout) == {**numbers, "checkpoint": f"{moved}/checkpoints/step-000002"}, again.stderr
    assert not (moved / "logs").is_dir() or sorted(path.name for path in moved.iterdir()) == sorted(
        path.name for path in (root / "runs/base").iterdir()
    )


def push(root: Path, address: str, out: str, *options: str, **environment: str):
    """A fresh process, whose client reads its address and token when it starts."""
    plain = {"HF_ENDPOINT": address, "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    given = plain | {"HF_HOME": str(root / "hf"), "HF_HUB_OFFLINE": "0"} | environment
    return program("fivefold.cli", "export", root / "runs/base", root / out, "--push", *options, env=given)


def test_an_export_is_pushed_with_a_card_that_has_the_run(root):
    with serving() as hub:
        done = push(root, hub.url, "pushed", "someone/tiny-grpo")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"pushed to {hub.url}/someone/tiny-grpo"
    (files,) = hub.repositories["models/someone/tiny-grpo"].values()
    assert files == {path.name: path.read_bytes() for path in (root / "pushed").iterdir() if path.is_file()}
    assert hub.created[0]["visibility"] == "private" and hub.tokens == {"Bearer hf_test"}
    _, head, text = files["README.md"].decode().split("---\n", 2)
    assert yaml.safe_load(head) == {"library_name": "transformers", "tags": ["fivefold", "grpo"], "license": "apache-2.0"}
    settings = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    assert settings["layout"] == "megatron:d1t1p1" and settings["steps"] == 2 and settings["group_size"] == 4
    row = json.loads((root / "runs/base/metrics.jsonl").read_text().splitlines()[-1])
    assert f"| `val/arithmetic/accuracy` | {row['val/arithmetic/accuracy']:.4g} | 2 |" in text
    assert "trained on: `train.parquet`" in text and "`apache-2.0`, that of the model it began with" in text
    # The card has no directory of this machine.
    assert str(root) not in files["README.md"].decode()


def test_what_the_hub_refuses_is_one_sentence_and_the_export_stays(root):
    with serving(refuses=403) as hub:
        done = push(root, hub.url, "refused", "someone/tiny")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert f"{root}/refused is written, and cannot be uploaded to someone/tiny: " in done.stderr
    assert (
        f"upload it with `hf upload someone/tiny {root}/refused`" in done.stderr
        and (root / "refused/model.safetensors").is_file()
    )


@pytest.mark.parametrize(
    ("options", "environment", "sentence"),
    [
        (["tiny"], {}, "--push must be OWNER/NAME: got 'tiny'"),
        (["a/b/c"], {}, "--push must be OWNER/NAME: got 'a/b/c'"),
        (["a/b"], {"HF_TOKEN": ""}, "--push needs a token that may write: `hf auth login`, or the variable HF_TOKEN"),
        (["a/b"], {"HF_HUB_OFFLINE": "1"}, "--push needs the hub, and HF_HUB_OFFLINE is set: unset it"),
        (["a/b", "--to", "megatron"], {}, "--push is for forms that the hub's users load: huggingface or adapter"),
    ],
)
def test_a_push_that_cannot_be_is_refused_before_anything_is_written(root, options, environment, sentence):
    done = push(root, "http://127.0.0.1:9", "nothing", *options, **environment)
    assert done.returncode == 2 and sentence in done.stderr, done.stderr
    assert not (root / "nothing").exists() and os.environ.get("HF_TOKEN") != "hf_test"
