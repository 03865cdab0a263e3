"""Whole runs with adapters: the engine samples from the merged model, a run resumes on another layout, what leaves it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.support.commands import fivefold
from tests.support.whole_runs import assert_same, make_model, make_pairs, metrics, write_run

RUN = """
policy: {backend: "megatron:d2", tokens_per_micro_batch: 128, optimizer: {lr: 1.0e-2},
         lora: {rank: 4, alpha: 6, exclude_modules: [gate_proj]}}
algorithm: {name: grpo, group_size: 4, kl: {coef: 0.1}}
engine: {verify_weights_every: 1}
data: {prompts_per_step: 4, max_response_tokens: 8}
trainer: {steps: 4, save_every: 1, device: cpu, guard: {every: 1}}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    make_model(root, rows=16)
    write_run(root, RUN, relative=True)
    return root


@pytest.fixture(autouse=True)
def _in_root(root, monkeypatch):
    monkeypatch.chdir(root)


def run(name: str, *changes: str, command: str = "train"):
    return fivefold(command, "run.yaml", f"trainer.run_dir=runs/{name}", *changes)


@pytest.fixture(scope="module")
def whole(root):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        done = run("whole")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_begins_at_its_base_and_its_engine_is_the_trainer_s_model(root, whole):
    """The KL of the first step is exactly 0; log-probs of the engine, which has merged weights, are the trainer's."""
    rows = metrics(root, "whole")
    assert rows[0]["policy/kl_reference"] == 0 and rows[-1]["policy/kl_reference"] > 1e-4
    assert all(row["rollout/logprob_diff_max"] < 1e-5 for row in rows)
    assert "adapters rank 4, x 1.5, on q_proj, k_proj, v_proj, o_proj, up_proj, down_proj: " in whole
    assert "the reference is the model without them" in whole


@pytest.mark.slow
def test_what_adapters_have_learned_arrives_in_an_engine_and_in_files_of_bfloat16(root):
    """Whether the trainer has the model, whose files are in bfloat16, in bfloat16 or in float32.

    Less than half would arrive in weights that are rounded to the nearest. Before the first update there is nothing to lose.
    """
    small = ("policy.optimizer.lr=1e-5", "algorithm.updates_per_step=4", "trainer.save_every=4", "policy.lora.max_lost=0.5")
    base = root / "base16"
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.bfloat16)
    shutil.copytree(root / "model", base)
    model.save_pretrained(base)
    small += (f"model.path={base}",)
    for dtype in ("bfloat16", "float32"):
        done = run(f"rounded-{dtype}", *small, "engine.dtype=bfloat16", f"policy.dtype={dtype}")
        assert done.returncode == 0 and "the engine gets them merged, in bfloat16" in done.stdout
        lost = [row.get("rollout/lora_lost") for row in metrics(root, f"rounded-{dtype}")]
        # The standard error of the rounding is 0.01 here: a tiny model has few weights.
        assert lost[0] is None and max(map(abs, lost[1:])) < 0.05, lost
        assert "adapters add is lost" not in done.stdout
        for form in ("huggingface", "adapter"):
            done = fivefold("export", f"runs/rounded-{dtype}", f"{form}-{dtype}", "--to", form)
            assert done.returncode == 0, done.stderr
        arrives, nearest = shares_of_files(base, root / f"huggingface-{dtype}", root / f"adapter-{dtype}")
        assert abs(arrives - 1) < 0.05 and nearest < 0.5, (arrives, nearest)
    done = run("kept", *small, "engine.dtype=float32", "policy.dtype=float32")
    assert done.returncode == 0 and "merged, in" not in done.stdout and "adapters add is lost" not in done.stdout
    assert max(row.get("rollout/lora_lost", 0) for row in metrics(root, "kept")) < 0.01


@pytest.mark.slow
def test_adapters_that_float16_loses_are_reported_and_can_end_a_run(root):
    """Weights below 6e-5 have a distance of 6e-8 in float16, and are rounded to the nearest."""
    base = root / "small"
    shutil.copytree(root / "model", base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    for name, weight in model.named_parameters():
        if "proj" in name:
            weight.data *= 1e-4
    model.save_pretrained(base)
    small = (f"model.path={base}", "policy.optimizer.lr=1e-9", "algorithm.updates_per_step=4", "trainer.save_every=0")
    done = run("lost", *small, "engine.dtype=float16", "policy.dtype=float32", "policy.lora.max_lost=0.5")
    lost = [row.get("rollout/lora_lost") for row in metrics(root, "lost")]
    assert done.returncode == 1 and len(lost) == 3 and lost[0] is None and min(lost[1:]) > 0.5, (lost, done.stderr)
    assert done.stdout.count("of what the adapters add is lost in the engine's float16") == 3
    assert "after 12 updates" in done.stderr and "policy.lora.max_lost = 0.5 ends the run" in done.stderr


def shares_of_files(base: Path, merged: Path, adapter: Path) -> tuple[float, float]:
    """The shares of what an exported adapter adds: in the exported model, and in weights rounded to the nearest."""
    before, after = (load_file(directory / "model.safetensors") for directory in (base, merged))
    tensors, sums_3 = load_file(adapter / "adapter_model.safetensors"), torch.zeros(3, dtype=torch.float64)
    for name in (name for name in tensors if name.endswith("lora_A.weight")):
        module = name.removeprefix("base_model.model.").removesuffix("lora_A.weight") + "weight"
        assert before[module].dtype == after[module].dtype == torch.bfloat16
        share = 1.5 * tensors[name.replace("lora_A", "lora_B")].double() @ tensors[name].double()
        nearest = (before[module].double() + share).bfloat16()
        changes = [weight.double() - before[module].double() for weight in (after[module], nearest)]
        sums_3 += torch.stack([(change * share).sum() for change in (*changes, share)])
    arrives, by_nearest, whole = sums_3.tolist()
    return arrives / whole, by_nearest / whole


@pytest.mark.slow
def test_a_run_resumes_on_another_layout_with_the_same_metrics(root, whole):
    first = run("resumed", "trainer.steps=2")
    assert first.returncode == 0, first.stderr
    rest = run("resumed", "policy.backend=megatron:t2")
    assert rest.returncode == 0 and "resumed after step 2" in rest.stdout, rest.stderr
    assert_same(metrics(root, "resumed"), metrics(root, "whole"))
    files = sorted((root / "runs/whole/checkpoints/step-000004/policy").glob("*.safetensors"))
    assert 0 < sum(path.stat().st_size for path in files) < (root / "model/model.safetensors").stat().st_size


@pytest.mark.slow
def test_another_rank_is_refused_on_resume_and_cannot_be_accepted(whole):
    refused = run("whole", "policy.lora.rank=2", "trainer.steps=5")
    assert refused.returncode == 2 and "policy.lora.rank: 4 -> 2" in refused.stderr
    for accepted, sentence in (
        ("policy.lora", "policy.lora.rank: 4 -> 2"),
        ("policy.lora.rank", "a checkpoint holds adapters of"),
    ):
        again = run("whole", "policy.lora.rank=2", "trainer.steps=5", f"trainer.accept_changes=[{accepted}]")
        assert again.returncode == 2 and sentence in again.stderr, again.stderr


@pytest.mark.slow
def test_a_checkpoint_is_exported_merged_and_as_an_adapter_with_which_a_run_begins(root, whole):
    checkpoint = root / "runs/whole/checkpoints/step-000004"
    for out, form in (("merged", "huggingface"), ("adapter", "adapter")):
        done = fivefold("export", checkpoint, out, "--to", form)
        assert done.returncode == 0, done.stderr
    base, merged = (load_file(root / name / "model.safetensors") for name in ("model", "merged"))
    tensors, config = (
        load_file(root / "adapter/adapter_model.safetensors"),
        json.loads(Path("adapter/adapter_config.json").read_text()),
    )
    assert (config["r"], config["lora_alpha"], config["peft_type"], config["task_type"]) == (4, 6, "LORA", "CAUSAL_LM")
    assert config["base_model_name_or_path"] == str(root / "model") and "gate_proj" not in config["target_modules"]
    for name, tensor in base.items():
        a = tensors.pop(f"base_model.model.{name.removesuffix('weight')}lora_A.weight", None)
        b = tensors.pop(f"base_model.model.{name.removesuffix('weight')}lora_B.weight", None)
        wanted = tensor if a is None else tensor + 1.5 * b @ a
        torch.testing.assert_close(merged[name], wanted, rtol=0, atol=0 if a is None else 1e-6)
    assert not tensors
    # What was learned continues as it was: the next run begins where this one ended, its reference is the base.
    later = run("later", "policy.lora.path=adapter", "trainer.steps=1")
    assert later.returncode == 0, later.stderr
    assert metrics(root, "later")[0]["policy/kl_reference"] > 1e-4
    unlike = run("unlike", "policy.lora.path=adapter", "policy.lora.alpha=8", command="check")
    assert unlike.returncode == 2 and "lora.alpha must be lora_alpha of" in unlike.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_other_methods_learn_with_adapters(root, name):
    pairs = make_pairs(root)
    data = [f"data.train=[{pairs}]", "data.chosen_key=chosen"] if name == "dpo" else []
    done = fivefold(
        "train", "run.yaml", f"trainer.run_dir=runs/{name}", f"algorithm={{name: {name}}}", "trainer.steps=3", *data
    )
    assert done.returncode == 0, done.stderr
    losses = [row["policy/loss"] for row in metrics(root, name)]
    assert len(losses) == 3 and losses[-1] < losses[0]
