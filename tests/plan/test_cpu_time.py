"""The time of a step on a CPU: operations, measured rates, and the trial that is offered where it is long."""

from __future__ import annotations

import json
import re
import shlex
import time

import pytest

from fivefold.cli import main
from fivefold.config import RunConfig
from fivefold.models.families import load_spec
from fivefold.plan import cpu_time
from fivefold.plan.check import check
from fivefold.plan.cpu_time import Rates, describe_cpu_step, measured_rates, step_operations, step_seconds, trial_of
from fivefold.plan.estimate import Lengths
from fivefold.plan.memory import training_flops
from tests.support.commands import program
from tests.support.hub import serving
from tests.support.public_shapes import write_shape
from tests.support.tiny_models import make_model, make_tokenizer

LENGTHS = Lengths(prompt=100, response=300)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_shape(tmp_path_factory.mktemp("cpu") / "model", "Qwen3-0.6B")


def config(model, *overrides):
    return RunConfig.from_overrides([
        f"model.path={model}", "data.train=[x.jsonl]", "policy.dtype=float32", "trainer.device=cpu",
        "reward.functions={gsm8k: 1.0}", "algorithm.group_size=8", "data.prompts_per_step=32", *overrides,
    ])  # fmt: skip


def test_a_step_counts_sampling_each_update_and_each_pass(model):
    spec, tokens = load_spec(model), 32 * 8 * 400
    once = training_flops(spec, tokens, 400)
    operations = {
        "grpo": step_operations(config(model, "algorithm.kl={coef: 0}"), spec, LENGTHS),
        "kl": step_operations(config(model, "algorithm.kl={coef: 0.1}"), spec, LENGTHS),
        "epochs": step_operations(config(model, "algorithm.kl={coef: 0}", "algorithm.ppo_epochs=2"), spec, LENGTHS),
        "sft": step_operations(config(model, "algorithm.name=sft"), spec, LENGTHS),
    }
    # A forward pass is a third of an update. Several updates need the log-probs before them.
    assert operations["grpo"] == pytest.approx(once * 4 / 3)
    assert operations["kl"] == pytest.approx(once * 5 / 3)
    assert operations["epochs"] == pytest.approx(once * 8 / 3)
    assert operations["sft"] == pytest.approx(once / 8)


def test_each_decoding_step_reads_the_weights_once(model):
    spec, rates = load_spec(model), Rates(1e30, 1e9)
    seconds = step_seconds(config(model), spec, LENGTHS, rates)
    assert seconds == pytest.approx(300 * spec.parameters * 4 / 1e9)
    assert step_seconds(config(model, "engine.max_num_seqs=64"), spec, LENGTHS, rates) == pytest.approx(4 * seconds)


def test_the_rates_are_measured_here_in_a_fraction_of_a_second():
    measured_rates.cache_clear()
    begin = time.process_time()
    rates = measured_rates()
    assert time.process_time() - begin < 5 and 1e8 < rates.flops < 1e14 and 1e7 < rates.bytes < 1e13


def test_a_long_step_is_told_with_the_whole_run_and_a_trial(model):
    sentences, trial = describe_cpu_step(config(model, "trainer.steps=233"), load_spec(model), lambda: Rates(5e10, 5e9))
    assert re.match(r"a step takes at least [\d.]+ hours on this CPU, 233 steps [\d.]+ days: ", sentences[0]), sentences
    assert "at the 50 GFLOP/s that numpy's matrix product reaches here" in sentences[0]
    assert re.match(r"a trial shows in at least [\d.]+ (s|minutes) whether everything works", sentences[1]), sentences
    assert trial == [
        "trainer.steps=3", "data.prompts_per_step=4", "data.max_response_tokens=64", "trainer.run_dir=runs/trial",
        "trainer.resume=never",
    ]  # fmt: skip
    # The trial is a run that can be configured.
    assert check(config(model, *trial)).trial == []


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with a model and data, on a machine that takes long for them."""
    monkeypatch.chdir(tmp_path)
    make_tokenizer(make_model("qwen3", tmp_path / "model"))
    row = {"data_source": "openai/gsm8k", "prompt": "1+1=", "reward_model": {"ground_truth": "2"}}
    (tmp_path / "train.jsonl").write_text("\n".join([json.dumps(row)] * 96))
    monkeypatch.setattr(cpu_time, "_FEW", 0)
    monkeypatch.setattr(cpu_time, "measured_rates", lambda: Rates(1e4, 1e4))
    return tmp_path


def test_init_and_check_print_the_time_of_the_whole_run_and_a_trial_as_it_is_typed(here, capsys):
    assert main(["init", "my run.yaml", "--model", "model", "--data", "train.jsonl", "--gpus", "0", "--yes"]) == 0
    *_, about, trial, last = capsys.readouterr().out.splitlines()
    assert re.match(r"note     a trial shows in at least [\d.]+ (minutes|hours|days)", about)
    typed = "fivefold train 'my run.yaml' trainer.steps=3 data.prompts_per_step=4 data.max_response_tokens=64 "
    assert trial == f"next     {typed}trainer.run_dir=runs/trial trainer.resume=never"
    assert last == "next     fivefold train 'my run.yaml'"
    assert main(["check", "my run.yaml", "algorithm.group_size=4"]) == 0
    output = capsys.readouterr().out
    # 96 rows, 32 of them a step.
    assert re.search(r"note     a step takes at least [\d.]+ (hours|days) on this CPU, 3 steps [\d.]+ ", output), output
    line = output.splitlines()[-1]
    assert shlex.split(line)[2:7] == ["fivefold", "train", "my run.yaml", "algorithm.group_size=4", "trainer.steps=3"]
    assert main(["check", *shlex.split(line)[4:]]) == 0


def test_a_model_of_the_hub_gets_an_estimate_by_its_config_alone(model, tmp_path):
    keys = ["model.path=some/model", "data.train=[x.jsonl]", "policy.dtype=float32", "trainer.device=cpu"]
    given = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
    with serving() as hub:
        hub.push("some/model", {"config.json": (model / "config.json").read_bytes(), "model.safetensors": b"."}, "models")
        output = program("fivefold.cli", "check", *keys, env={**given, "HF_ENDPOINT": hub.url}).stdout
        assert "note     a step takes at least " in output, output
        (download,) = hub.downloads("some/model", "models")
        assert download.endswith("/config.json") and hub.large_downloads() == []
    gone = program("fivefold.cli", "check", *keys, env={**given, "HF_HOME": str(tmp_path / "none"), "HF_ENDPOINT": hub.url})
    assert "its sizes are not checked" in gone.stdout and "a step takes" not in gone.stdout
    assert "Traceback" not in gone.stderr, gone.stderr


@pytest.mark.parametrize(("updates", "prompts"), [(1, 4), (3, 6), (8, 8)])
def test_a_trial_has_as_many_prompts_as_its_optimizer_steps_need(model, updates, prompts):
    small = config(model, f"algorithm.updates_per_step={updates}", "data.prompts_per_step=48")
    assert f"data.prompts_per_step={prompts}" in trial_of(small)


def test_a_step_of_few_operations_is_not_measured(model, monkeypatch):
    monkeypatch.setattr(cpu_time, "_FEW", 1e30)

    def never() -> Rates:
        raise AssertionError("nothing is measured")

    assert describe_cpu_step(config(model), load_spec(model), never) == ([], [])


def test_a_short_step_needs_no_trial(model):
    assert describe_cpu_step(config(model), load_spec(model), lambda: Rates(1e15, 1e15))[1] == []
