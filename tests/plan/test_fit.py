"""A run that cannot fit its device is refused with what would help, by numbers that follow from the estimate."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from fivefold.config import RunConfig
from fivefold.config.gpus import GPUS
from fivefold.keys.findings import Findings
from fivefold.models.families import spec_from_config
from fivefold.plan.check import _check_packages
from fivefold.plan.devices import Device
from fivefold.plan.fit import check_fit
from fivefold.plan.memory import Memory, OtherMemory
from fivefold.plan.roles import memory_of

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip
SPEC = spec_from_config(LLAMA_8B)
GIB = 2**30


def config(**sections) -> RunConfig:
    sections = {
        "launch": {"gpu": "h100-80g"},
        "algorithm": {"kl": {"coef": 0}},
        "data": {"train": ["x"], "max_prompt_tokens": 1024, "max_response_tokens": 3072},
        **sections,
    }
    return RunConfig.of(model={"path": "here"}, **sections)


def refused(config: RunConfig) -> str:
    findings = Findings()
    check_fit(findings, config, lambda changed: memory_of(changed, SPEC))
    return "".join(findings.errors)


def test_eight_billion_parameters_need_eighteen_bytes_each_and_do_not_fit_one_gpu():
    """bfloat16 parameters 2 bytes, float32 gradients 4, Adam's moments and copy 12."""
    states = memory_of(config(), SPEC)
    count = states.parameters // 2
    assert count == pytest.approx(8.03e9, rel=1e-3)
    assert (states.gradients, states.optimizer) == (4 * count, 12 * count)
    message = refused(config())
    least = float(re.search(r"training needs at least ([\d.]+) GiB", message)[1])
    activations = states.training["activations"]
    assert least == pytest.approx((18 * count + 0.7 * activations) / GIB, abs=0.06)
    assert "h100-80g has 79.1 GiB" in message


def test_every_change_that_is_named_makes_the_run_fit_by_the_number_that_is_given():
    message = refused(config(policy={"backend": "megatron:d8", "tokens_per_micro_batch": 65536}))
    assert "one of these makes it fit" in message
    named = re.findall(r"(policy\.[a-z_]+): (\S+) \(([\d.]+) GiB\)", message)
    assert {key for key, *_ in named} >= {"policy.recompute", "policy.backend"}
    for key, value, size in named:
        policy = {
            "backend": "megatron:d8",
            "tokens_per_micro_batch": 65536,
            key.removeprefix("policy."): yaml.safe_load(value),
        }
        changed = config(policy=policy)
        assert refused(changed) == "", (key, value)
        elastic = replace(changed, engine=replace(changed.engine, max_num_seqs=1))
        phases = memory_of(elastic, SPEC).phases.values()
        assert max(sum(parts.values()) - 0.3 * parts.get("activations", 0) for parts in phases) / GIB == pytest.approx(
            float(size), abs=0.06
        )


def test_a_reference_is_counted_by_its_own_layout_and_may_be_sharded_further(monkeypatch):
    """15 GiB of parameters whole on each of four GPUs, or half of them; while weights are synced there are 49 GiB of others."""
    sections = {"policy": {"backend": "megatron:t4", "tokens_per_micro_batch": 4096}, "algorithm": {"kl": {"coef": 0.1}}}
    halved, full = (config(**sections, reference={"backend": f"megatron:{layout}"}) for layout in ("d2t2", "d4"))
    sizes = [memory_of(one, SPEC).others["reference"].resident for one in (halved, full)]
    assert sizes == pytest.approx([SPEC.parameters, 2 * SPEC.parameters], rel=1e-3)
    monkeypatch.setattr("fivefold.plan.fit.device_of", lambda config: Device("a GPU", 60 * GIB))
    assert refused(halved) == ""
    message = refused(full)
    assert "one of these makes it fit" in message and "reference.backend: megatron:d2t2p1 (" in message
    # More ranks would have to be more for each model.
    assert "t8" not in message


def test_passes_of_too_many_sequences_are_refused_and_their_key_is_named():
    """256 of 4096 tokens on two ranks: 2 x 3 x 14336 bytes a token for a layer's MLP alone are 42 GiB on each."""
    policy = {"backend": "megatron:d4t2", "recompute": "full", "sequences_per_forward": 256}
    sections = {"policy": policy, "algorithm": {"kl": {"coef": 0.1}}}
    message = refused(config(**sections, data={"train": ["x"], "prompts_per_step": 512, "max_response_tokens": 3072}))
    assert "a pass without gradient needs at least" in message and "a pass of the reference needs at least" in message
    assert "policy.sequences_per_forward: null (" in message
    few = config(**sections, data={"train": ["x"], "prompts_per_step": 8, "max_response_tokens": 3072})
    assert "a pass without gradient" not in refused(few), "a rank has as many sequences as a step"


def test_a_change_that_does_not_suffice_is_not_named():
    """Parameters, gradients and optimizer are 135 GiB on one GPU: no saving of activations helps."""
    offload = {"parameters": True, "gradients": True, "optimizer": True}
    message = refused(config(policy={"tokens_per_micro_batch": 4096, "offload": offload}))
    assert "one of these makes it fit: policy.backend" in message
    assert "recompute" not in message and "tokens_per_micro_batch" not in message


def test_changes_that_help_only_together_are_named_together():
    message = refused(config(policy={"tokens_per_micro_batch": 65536}, launch={"gpu": "a10-24g"}))
    assert "together these make it fit: policy.recompute: full; " in message and "policy.backend: megatron:" in message


def test_a_run_that_nothing_helps_says_so():
    huge = spec_from_config({**LLAMA_8B, "num_hidden_layers": 2, "hidden_size": 131072, "intermediate_size": 2**20})
    findings = Findings()
    check_fit(findings, config(), lambda changed: memory_of(changed, huge))
    assert "it still needs" in findings.errors[0] and "use a smaller model or larger GPUs" in findings.errors[0]


def test_each_phase_is_compared_and_named(monkeypatch):
    """Weight sync has both models on the device: policy 3, engine 4, reference 2 of 8 GiB; training has 8, sampling 7."""
    parts = Memory(parameters=3 * GIB, gradients=GIB, optimizer=GIB, activations=GIB, others={"reference": OtherMemory(0, 2 * GIB)}, engine=4 * GIB, cache=GIB,
                   offload=frozenset({"gradients", "optimizer"}))  # fmt: skip
    assert {name: sum(sizes.values()) // GIB for name, sizes in parts.phases.items()} == {
        "training": 8, "syncing weights": 9, "sampling": 10,
    }  # fmt: skip
    monkeypatch.setattr("fivefold.plan.fit.device_of", lambda config: Device("a GPU", int(8.5 * GIB)))
    findings = Findings()
    check_fit(findings, config(policy={"recompute": "full"}), lambda changed: parts)
    assert (
        "syncing weights needs at least 9.0 GiB, sampling needs at least 10.0 GiB on the fullest rank" in findings.errors[0]
    )
    monkeypatch.setattr("fivefold.plan.fit.device_of", lambda config: Device("a GPU", int(10.2 * GIB)))
    findings = Findings()
    check_fit(findings, config(), lambda changed: parts)
    assert not findings.errors and "memory is tight: about 10.0 GiB" in findings.notes[0]


def test_the_table_of_gpus_is_that_of_the_data_sheets():
    """A driver reports less than the data sheet's GB, which are 10^9 bytes for some and 2^30 for others."""
    for name, gpu in GPUS.items():
        sheet = int(name.rpartition("-")[2].removesuffix("g"))
        assert 0.9 * sheet < gpu.memory_gib * GIB / 1e9 < 1.075 * sheet, name
        assert gpu.tflops > 0 and gpu.memory_gb_s > gpu.link_gb_s > 0


@pytest.mark.parametrize(
    ("megatron", "says"),
    [
        ({"bridge_type": "megatron-bridge"}, "policy.megatron.bridge_type: megatron-bridge needs megatron.bridge, not installed here"),
        ({"transformer_impl": "transformer_engine"}, "policy.megatron.transformer_impl: transformer_engine needs transformer_engine, not installed"),
        ({"bridge_type": "mbridge"}, "policy.megatron.bridge_type: mbridge needs mbridge, not installed here"),
    ],
)  # fmt: skip
def test_a_package_that_is_missing_is_named(monkeypatch, megatron, says):
    monkeypatch.setattr(
        "fivefold.plan.check.missing_packages", lambda names: [f"{name}, not installed here" for name in names]
    )
    run = config(policy={"megatron": megatron})
    findings = Findings()
    _check_packages(findings.at("policy").at("megatron"), run.policy, has_gpus=True)
    assert says in findings.errors[0]


def test_check_says_before_a_run_that_337_gib_fit_no_gpu(tmp_path: Path, capsys):
    """From the command line: the model's files are read too, and named where they are not there."""
    from fivefold import cli

    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    run = tmp_path / "run.yaml"
    run.write_text(f"model: {{path: {tmp_path}}}\nlaunch: {{gpu: h100-80g}}\ndata: {{train: [x]}}\n")
    assert cli.main(["check", str(run)]) == 2
    output = capsys.readouterr().err
    assert "no model.safetensors" in output and "Traceback" not in output


def test_what_a_process_reward_model_can_give_up_is_named():
    """Policy, model and what that is compared with, 8 billion parameters each, on eight GPUs: 2 + 4 + 12 / 8 bytes, twice, and 2."""
    prime = config(
        algorithm={"name": "prime", "group_size": 4}, policy={"backend": "megatron:d8"}, prm={"backend": "megatron:d4t2"}
    )
    memory = memory_of(prime, SPEC)
    count = memory.parameters // 2
    assert memory.others["prm"].state == pytest.approx((2 + 4 + 12 / 4 + 2) * count / 2, rel=1e-3)
    message = refused(prime)
    assert "prm.offload: {parameters: true, gradients: true, optimizer: true}" in message and "prm.reference" not in message
