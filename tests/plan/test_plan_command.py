"""`fivefold plan` from the command line, and what `check` says of a step's time."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from fivefold import cli
from fivefold.config import RunConfig
from fivefold.models.families import load_spec
from fivefold.plan.check import check
from fivefold.plan.efficiency import write_calibration
from fivefold.plan.gain import describe_step
from fivefold.plan.measured import Rate
from tests.support.commands import python
from tests.support.public_shapes import write_shape
from tests.support.tiny_models import make_tokenizer

ROWS = '{"prompt": "1+1=", "ground_truth": "2"}\n' * 64


def plan(capsys, *arguments: object) -> str:
    assert cli.main(["plan", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def pasted(printed: str) -> dict:
    """The YAML below the first run's figures."""
    block = printed.split("\n1. ", 1)[1].split("\n2. ", 1)[0]
    return yaml.safe_load(block.split("\n\n", 1)[1])


def test_it_prints_times_memory_limit_cost_and_yaml(tmp_path, capsys):
    model = write_shape(tmp_path / "model", "Qwen3-30B-A3B")
    output = plan(capsys, "--model", model, "--gpus", 32, "--gpu", "h100-80g", "--price", 2, "--top", 2,
                "data.prompts_per_step=64", "data.max_response_tokens=4096", "--response-tokens", 1500,
                "policy.optimizer.lr=1e-5", "data.train=[x]")  # fmt: skip
    assert "attention of flash-attn-4 (pip install" in output
    assert "qwen3_moe, 30.53 billion parameters" in output and "cluster  32 x h100-80g, 4 nodes" in output
    assert "responses of 1500 tokens on average" in output and "\n2. megatron:" in output and "\n3. " not in output
    for word in (
        "time     ",
        "rollout ",
        "backward ",
        "memory   GiB on the fullest rank ",
        "         training ",
        "         sampling ",
        "limit    ",
        "a million tokens",
    ):
        assert word in output, word
    tree = pasted(output)
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump(tree))
    config = RunConfig.from_yaml(run)
    load_spec(model).check_layout(config.layout, config.policy.megatron.pipeline_split)
    assert config.data.max_response_tokens == 4096 and config.policy.optimizer.lr == 1e-5 and config.launch.gpu == "h100-80g"


def test_the_yaml_of_a_run_s_file_is_pasted_into_it_and_passes_check(models, tmp_path, capsys):
    """Here vLLM is not installed, which is all that may be wanting."""
    data, run = tmp_path / "rows.jsonl", tmp_path / "run.yaml"
    data.write_text(ROWS)
    base = {
        "model": {"path": str(models("qwen3")), "tokenizer": str(make_tokenizer(tmp_path / "words"))},
        "policy": {"optimizer": {"lr": 1e-5}},
        "data": {"train": [str(data)], "max_prompt_tokens": 32, "max_response_tokens": 32},
        "reward": {"functions": {"format": 1.0}},
        "launch": {"allocation": "vllm:d2|megatron[actor]:d2"},
        "trainer": {"run_dir": str(tmp_path / "run")},
    }
    run.write_text(yaml.safe_dump(base))
    tree = pasted(plan(capsys, run, "--gpus", 4, "--gpu", "a10-24g"))
    assert tree["launch"] == {"gpu": "a10-24g", "allocation": None} and "model" not in tree
    run.write_text(yaml.safe_dump(base | tree | {"policy": base["policy"] | tree["policy"]}))
    findings = check(RunConfig.from_yaml(run))
    assert [error for error in findings.errors if "vLLM is not installed" not in error] == []
    assert any(note.startswith("a step takes about ") for note in findings.notes)


@pytest.mark.parametrize(
    ("shape", "gpus", "gpu", "method"),
    [
        ("Qwen3-0.6B", 1, "rtx4090-24g", "sft"),
        ("Qwen3-8B", 8, "a100-40g", "grpo"),
        ("Qwen3-30B-A3B", 32, "h100-80g", "dapo"),
        ("Qwen3-235B-A22B", 256, "h100-80g", "ppo"),
    ],
)
def test_every_plan_is_a_run_that_lacks_nothing_but_its_machines(tmp_path, capsys, shape, gpus, gpu, method):
    """By `check`, which asks for the weights, the tokenizer, the rows and vLLM besides."""
    model, run = write_shape(tmp_path / "model", shape), tmp_path / "run.yaml"
    arguments = ("--model", model, "--gpus", gpus, "--gpu", gpu, f"algorithm.name={method}", "data.train=[rows.jsonl]")
    for proposal in json.loads(plan(capsys, *arguments, "--json"))["runs"]:
        run.write_text(yaml.safe_dump(proposal["run"]))
        findings = check(RunConfig.from_yaml(run))
        not_here = ("no model.safetensors", "no tokenizer in", "no file at rows.jsonl", "vLLM is not installed")
        assert [error for error in findings.errors if not any(part in error for part in not_here)] == [], proposal["run"]
        assert findings.ignored == []


def test_json_has_the_same_for_programs(tmp_path, capsys):
    model = write_shape(tmp_path, "Qwen3-8B")
    proposals = json.loads(plan(capsys, "--model", model, "--gpus", 8, "--gpu", "h200-141g", "--json", "--price", 3))
    assert proposals["cluster"]["gpus"] == 8 and len(proposals["runs"]) == 3
    for run in proposals["runs"]:
        assert run["seconds"] == pytest.approx(sum(run["parts"].values()))
        assert run["cost_per_million_tokens"] == pytest.approx(3 * 8 / 3600 / run["tokens_per_second"] * 1e6)
        assert run["memory"]["training"]["total"] < 141e9 and run["run"]["policy"]["backend"].startswith("megatron:")


def test_a_calibration_changes_what_is_predicted(tmp_path, capsys):
    model, path = write_shape(tmp_path, "Qwen3-0.6B"), tmp_path / "rates.json"
    arguments = ("--model", model, "--gpus", 1, "--gpu", "h200-141g", "--json", "--top", 1)
    before = json.loads(plan(capsys, *arguments))["runs"][0]["parts"]
    write_calibration(path, [Rate("attention_backward", 1024, 5.0, "h200-141g", "here")], "today")
    after = json.loads(plan(capsys, *arguments, "--calibration", path))["runs"][0]["parts"]
    assert after["backward"] > 1.5 * before["backward"] and after["forward"] == pytest.approx(before["forward"], rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpu", "h100-80g", "--model", "{model}"], "say how many GPUs there are: --gpus N"),
        (["--gpus", "8", "--model", "{model}"], "this machine has no known GPU: pass --gpu with one of"),
        (["--gpus", "8", "--gpu", "h100", "--model", "{model}"], "unknown GPU 'h100': known are a10-24g"),
        (["--gpus", "12", "--gpu", "h100-80g", "--model", "{model}"], "got 12 with 8 on a node; take 8 or 16"),
        (["--gpus", "8", "--gpu", "h100-80g"], "name the model: --model DIRECTORY"),
        (["--gpus", "8", "--gpu", "h100-80g", "--model", "nowhere"], "no directory nowhere, and no hub id"),
        (["--gpus", "8", "--gpu", "h100-80g", "--model", "Nobody/None"], "its config.json is enough: --model DIRECTORY"),
        (["--gpus", "8", "--gpu", "h100-80g", "--model", "{model}", "--calibration", "{model}/config.json"],
         "config.json is not a file of `fivefold plan --calibrate`"),
        (["--gpus", "1", "--gpu", "l4-24g", "--model", "{model}"], "do not fit 1 x l4-24g on any layout"),
        (["--gpus", "8", "--gpu", "h100-80g", "--model", "{model}", "data.prompts=3"], "unknown key 'data.prompts'"),
        (["{model}/run.yaml", "--gpus", "8", "--gpu", "h100-80g"], "no configuration file at"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_one_sentence(tmp_path, capsys, monkeypatch, arguments, says):
    monkeypatch.setattr("fivefold.config.machine.visible_gpus", lambda: 0)
    write_shape(tmp_path, "Qwen3-8B")
    assert cli.main(["plan", *(one.format(model=tmp_path) for one in arguments)]) == 2
    message = capsys.readouterr().err
    assert says in message and len(message.strip().splitlines()) == 1


def test_planning_needs_no_torch(tmp_path):
    model = write_shape(tmp_path, "Qwen3-8B")
    done = python(
        "-c",
        "import sys\nfrom fivefold.cli import main\n"
        f"assert main(['plan', '--model', {str(model)!r}, '--gpus', '8', '--gpu', 'h100-80g']) == 0\n"
        "assert not {'torch', 'megatron', 'transformers', 'numpy'} & set(sys.modules), sys.modules.keys()",
    )
    assert done.returncode == 0, done.stderr


def run_of(model: Path, **sections) -> RunConfig:
    data = {"train": ["x"], "prompts_per_step": 64, "max_prompt_tokens": 1024, "max_response_tokens": 3072}
    return RunConfig.of(model={"path": str(model)}, data=data, **{"launch": {"gpu": "h200-141g"}, **sections})


def test_check_says_what_a_step_takes_and_the_change_that_gains_most(tmp_path):
    model = write_shape(tmp_path, "Qwen3-8B")
    slow = run_of(model, policy={"backend": "megatron:d2t4"})
    fits, takes, gains = describe_step(slow, load_spec(model))
    held = float(re.fullmatch(r"it fits h200-141g: about ([\d.]+) of 139.8 GiB on the fullest rank", fits)[1])
    assert held < 139.8
    assert takes.startswith("a step takes about ") and "h200-141g with prompts of 512 and responses of 1536 tokens" in takes
    assert gains.startswith("what gains most: engine.backend: vllm:d8, about ")
    seconds = float(gains.split("about ")[1].split(" s ")[0])
    better = run_of(model, policy={"backend": "megatron:d2t4"}, engine={"backend": "vllm:d8"})
    assert describe_step(better, load_spec(model))[1].startswith(f"a step takes about {seconds} s")


def test_what_check_lets_start_but_the_estimate_does_not_hold_is_told(tmp_path):
    """`check` refuses what cannot fit; between that and the estimate a run may or may not fit."""
    model = write_shape(tmp_path, "Qwen3-8B")
    wide = run_of(model, policy={"backend": "megatron:d8"})
    assert describe_step(wide, load_spec(model))[0].startswith("it may not fit h200-141g: about ")


def test_recomputation_that_is_not_needed_is_named(tmp_path):
    model = write_shape(tmp_path, "Qwen3-1.7B")
    config = run_of(model, policy={"backend": "megatron:d8", "recompute": "full"}, algorithm={"name": "sft"})
    assert describe_step(config, load_spec(model))[2].startswith("what gains most: policy.recompute: none, about ")


def test_check_tries_flash_attn_4_and_names_what_its_import_lacks(tmp_path, monkeypatch):
    """FlashAttention 2 has a package of the same name, without `cute`; what is older than Hopper uses neither."""
    model, package = write_shape(tmp_path, "Qwen3-8B"), tmp_path / "flash_attn"
    (package / "cute").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "cute" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    def output_of(gpu: str) -> str:
        return describe_step(run_of(model, policy={"backend": "megatron:d2t4"}, launch={"gpu": gpu}), load_spec(model))[1]

    installed = [output_of(gpu) for gpu in ("h200-141g", "a100-80g")]
    shutil.rmtree(package / "cute")
    (package / "cute").mkdir()
    (package / "cute" / "__init__.py").write_text("import cutlass_libs_that_are_not_there")
    monkeypatch.syspath_prepend(tmp_path / "other")
    broken = output_of("h200-141g")
    assert (
        "flash-attn-4 (whose import fails: ModuleNotFoundError: No module named 'cutlass_libs_that_are_not_there'; pip"
        in broken
    )
    shutil.rmtree(package / "cute")
    without, old = (output_of(gpu) for gpu in ("h200-141g", "a100-80g"))
    assert "flash" not in installed[0] and 'without flash-attn-4 (pip install "fivefold[flash]"): ' in without
    shorter, longer = (float(text.split("about ")[1].split(" s ")[0]) for text in (installed[0], without))
    assert shorter < longer < 1.2 * shorter
    assert old == installed[1] and "flash" not in old


def test_a_calibration_that_cannot_be_read_keeps_no_run_from_starting(tmp_path, monkeypatch):
    model, path = write_shape(tmp_path, "Qwen3-1.7B"), tmp_path / "rates.json"
    path.write_text("{}")
    monkeypatch.setattr("fivefold.plan.efficiency.CALIBRATION", path)
    (message,) = describe_step(run_of(model), load_spec(model))
    assert message.startswith(f"no time is estimated: {path} is not a file of")


def test_nothing_is_said_of_the_time_on_a_device_without_rates(tmp_path):
    model = write_shape(tmp_path, "Qwen3-1.7B")
    config = run_of(model, launch={}, trainer={"device": "cpu"})
    assert describe_step(config, load_spec(model)) == []
