"""Whole runs of a model with a layer of multi-token prediction: sampled by an engine, trained or left alone, exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.commands import fivefold
from tests.support.documented import undocumented
from tests.support.tiny_models import add_mtp
from tests.support.whole_runs import make_model, train, write_run

RUN = """
policy: {backend: "megatron:d1", tokens_per_micro_batch: 128}
algorithm: {name: grpo, group_size: 2}
data: {prompts_per_step: 4, max_response_tokens: 12}
trainer: {steps: 2, save_every: 2}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A tiny MiMo: the family's layers are Qwen2's, which the command line does not make, so biases are put to a Qwen3's."""
    root = tmp_path_factory.mktemp("mtp")
    # vLLM's attention on CPUs has no heads narrower than 32.
    make_model(root, hidden=64, heads=2)
    config = json.loads((root / "model/config.json").read_text())
    state = load_file(root / "model/model.safetensors")
    kept = {name: tensor for name, tensor in state.items() if "_norm.weight" not in name or "self_attn" not in name}
    for name in list(kept):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            kept[name.replace(".weight", ".bias")] = torch.zeros(len(kept[name]))
    kept.setdefault("lm_head.weight", kept["model.embed_tokens.weight"].clone())
    save_file(kept, root / "model/model.safetensors", metadata={"format": "pt"})
    config |= {"tie_word_embeddings": False, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    config |= {"auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}}
    (root / "model/config.json").write_text(json.dumps(config))
    add_mtp(root / "model", 1, "mimo")
    write_run(root, RUN)
    return root


def export(root: Path, name: str, step: int = 2) -> tuple[dict[str, torch.Tensor], str]:
    done = fivefold("export", root / "runs" / name / f"checkpoints/step-{step:06d}", root / f"{name}-hf")
    assert done.returncode == 0, done.stdout + done.stderr
    return load_file(root / f"{name}-hf/model.safetensors"), done.stdout


def moved(root: Path, tensors: dict[str, torch.Tensor]) -> set[str]:
    before = load_file(root / "model/model.safetensors")
    assert set(tensors) == set(before)
    return {name for name, tensor in tensors.items() if not torch.equal(tensor, before[name])}


def test_a_run_that_does_not_train_them_exports_them_as_they_were(root):
    rows, _ = train(root, "alone")
    assert "policy/mtp_loss" not in rows[-1]
    # The engine is given the model's weights only, and samples what the trainer computes.
    assert rows[-1]["rollout/logprob_diff_max"] < 1e-4
    tensors, output = export(root, "alone")
    assert "layers of multi-token prediction as the model had them" in output
    assert moved(root, tensors) and not [name for name in moved(root, tensors) if "mtp" in name]
    assert json.loads((root / "alone-hf/config.json").read_text())["num_nextn_predict_layers"] == 1


def test_a_run_that_trains_them_exports_what_they_learned(root):
    rows, _ = train(root, "both", "policy.mtp.train=true", "policy.mtp.detach_encoder=true")
    assert all(row["policy/mtp_loss"] > 0 for row in rows)
    assert undocumented(name for row in rows for name in row) == []
    tensors, output = export(root, "both")
    assert "layers of multi-token prediction as they were trained" in output
    assert {name for name in tensors if "mtp" in name} <= moved(root, tensors)


@pytest.mark.vllm
def test_vllm_samples_from_the_model_whose_layers_are_trained(root):
    """It knows the model as the Qwen2 that it is without them, and none of the model's own code runs."""
    rows, _ = train(root, "vllm", "policy.mtp.train=true", "engine.backend=vllm:d1", "engine.vllm.kv_cache_memory_bytes=67108864",
                 "trainer.device=cpu")  # fmt: skip
    assert all(row["policy/mtp_loss"] > 0 and row["rollout/logprob_diff_max"] < 1e-4 for row in rows)


def test_in_sft_their_loss_falls_too_and_an_export_continues_where_they_were(root):
    rows = [{"prompt": f"{a}+{b}=", "response": f"#### {a + b}"} for a in range(8) for b in range(8)]
    (root / "sft.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = ["algorithm.name=sft", "algorithm.group_size=1", f"data.train=[{root}/sft.jsonl]", "reward.functions={}"]
    rows_of_sft, _ = train(root, "sft", *settings, "policy.mtp.train=true", "trainer.steps=12", "policy.optimizer.lr=1.0e-2")
    assert rows_of_sft[-1]["policy/mtp_loss"] < 0.7 * rows_of_sft[0]["policy/mtp_loss"]
    export(root, "sft", 12)
    (again,), _ = train(root, "again", *settings, "policy.mtp.train=true", "trainer.steps=1", f"model.path={root}/sft-hf")
    assert again["policy/mtp_loss"] < 0.7 * rows_of_sft[0]["policy/mtp_loss"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["policy.lora.rank=4"], "policy.mtp.train must be false with adapters"),
        (["policy.share_prefix=true"], "policy.share_prefix must be false with mtp.train"),
        (["policy.megatron.transformer_impl=auto"], "policy.megatron.transformer_impl must be torch with mtp.train"),
        (["policy.megatron.pipeline={pipeline_model_parallel_layout: 'Et|tL'}", "policy.backend='megatron:p2'"],
         "pipeline_model_parallel_layout must be left out with mtp.train"),
        (["model.path=ROOT/plain"], "policy.mtp.train needs layers of multi-token prediction"),
        (["model.path=ROOT/bare"], "lacks 16 tensors of a mimo model"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_in_one_sentence(root, overrides, says):
    if not (root / "plain").is_dir():
        for name in ("plain", "bare"):
            shutil.copytree(root / "model", root / name)
        config = json.loads((root / "model/config.json").read_text())
        (root / "plain/config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
        for name in ("plain", "bare"):
            state = {key: tensor for key, tensor in load_file(root / "model/model.safetensors").items() if "mtp" not in key}
            save_file(state, root / name / "model.safetensors", metadata={"format": "pt"})
    done = fivefold(
        "check", root / "run.yaml", "policy.mtp.train=true", *[override.replace("ROOT", str(root)) for override in overrides]
    )
    assert done.returncode != 0
    assert says in done.stdout + done.stderr


def test_settings_of_a_loss_that_is_not_computed_are_reported(root):
    done = fivefold("check", root / "run.yaml", "policy.mtp.detach_encoder=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mtp.train is false: no loss of further tokens is computed" in done.stdout
