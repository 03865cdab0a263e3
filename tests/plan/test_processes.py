"""The number of vLLM's processes on a GPU: one decision, for `auto`, for `plan` and for what `check` names."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from fivefold import cli
from fivefold.config import RunConfig
from fivefold.config.loader import ConfigError
from fivefold.config.validate import validate
from fivefold.models.families import load_spec
from fivefold.plan.check import check
from fivefold.plan.efficiency import Efficiencies
from fivefold.plan.estimate import Lengths, step_estimate
from fivefold.plan.gain import best_change
from fivefold.plan.hardware import Cluster
from fivefold.plan.measured import MEASURED
from fivefold.plan.processes import COUNTS, WORTH, decide, decided, fastest, step_seconds
from fivefold.plan.search import Space
from fivefold.plan.summary import describe
from tests.support.public_shapes import write_headers, write_shape

H200 = "h200-141g"
SMALL, LARGE = "SmolLM2-135M-Instruct", "Qwen3-8B"


@pytest.fixture
def run(tmp_path):
    """Name of a shape, keys of sections -> a run of 1,024 short responses on one H200 elsewhere."""

    def make(name: str = SMALL, gpus: int = 1, **sections) -> RunConfig:
        usual = {
            "policy": {"backend": f"megatron:d{gpus}", "offload": {"gradients": True, "optimizer": True}},
            "engine": {"backend": f"vllm:d{gpus}", "max_num_seqs": 1024, "processes": "auto"},
            "algorithm": {"group_size": 16, "kl": {"coef": 0}},
            "data": {"train": ["x"], "prompts_per_step": 64, "max_prompt_tokens": 200, "max_response_tokens": 400},
            "launch": {"gpu": H200},
        }
        changed = {key: {**usual.get(key, {}), **sections.get(key, {})} for key in {*usual, *sections}}
        return RunConfig.of(model={"path": str(write_shape(tmp_path / name, name))}, **changed)

    return make


def spec_of(config: RunConfig):
    return load_spec(Path(config.model.path))


def test_a_small_model_with_many_sequences_gets_several_processes(run):
    for name, gains in ((SMALL, True), (LARGE, False)):
        config = run(name)
        changed, why = decided(config, spec_of(config))
        assert (changed.engine.processes > 1) is gains, why
        assert why.startswith(f"engine.processes: auto is {changed.engine.processes}: a step takes about ")
        assert validate(changed).errors == []


def test_the_number_is_the_fewest_with_which_a_step_is_about_as_fast_as_it_can_be(run):
    config = run()
    times = step_seconds(config, spec_of(config), Cluster(H200, 1), Efficiencies(MEASURED, H200), Lengths.of(config.data))
    count = fastest(times)
    assert tuple(times) == COUNTS and times[count] <= min(times.values()) / (1 - WORTH)
    assert all(times[fewer] > min(times.values()) / (1 - WORTH) for fewer in times if fewer < count)
    assert fastest({1: 1.02, 2: 1.0, 4: 0.999}) == 1 and fastest({1: 1.1, 2: 1.0, 4: 0.99}) == 2


def test_plan_and_what_check_names_decide_as_auto_does(run):
    config = run(engine={"processes": 1})
    spec, cluster, rates, lengths = spec_of(config), Cluster(H200, 1), Efficiencies(MEASURED, H200), Lengths.of(config.data)
    count = decide(config, spec)[0]
    assert count > 1
    (best,) = Space(spec, config, cluster, rates, lengths).search(1)
    others = step_seconds(best.config, spec, cluster, rates, lengths)
    assert best.config.engine.processes == fastest(others) > 1
    now = step_estimate(config, spec, cluster, rates, lengths)
    assert best_change(config, spec, cluster, rates, lengths, now)[0] == f"engine.processes: {count}"


def test_auto_never_makes_a_run_that_is_refused(run):
    """Servers that leave the GPUs cannot sample ahead; cores that are not there prepare nothing."""
    ahead = run(rollout={"max_staleness": 1})
    assert validate(ahead).errors == [] and decide(ahead, spec_of(ahead))[0] == 1
    # 150,000 tokens, which two processes would divide.
    for longest, is_one in ((75_000, False), (75_001, True)):
        narrow = run(engine={"vllm": {"kv_cache_memory_bytes": 150_000 * 23040}, "max_model_len": longest})
        assert (decide(narrow, spec_of(narrow))[0] == 1) is is_one, "each process must hold the longest sequence"
    wide = run(gpus=16)
    assert decide(wide, spec_of(wide))[0] == 1, "ranks on two machines cannot reach each other's servers"


def test_servers_on_gpus_of_their_own_get_several_processes_too(run):
    apart = run(engine={"placement": "apart"}, rollout={"max_staleness": 1})
    count, why = decide(apart, spec_of(apart))
    assert count > 1, why
    assert validate(decided(apart, spec_of(apart))[0]).errors == []
    # Two machines of eight: each rank sends its weights over the network anyway.
    wide = run(gpus=8, engine={"placement": "apart"}, data={"prompts_per_step": 512}, rollout={"max_staleness": 1})
    assert decide(wide, spec_of(wide))[0] > 1


def test_auto_is_limited_by_the_cores_of_this_machine(run, monkeypatch):
    config = replace(run(), launch=RunConfig.of(model={"path": "x"}, data={"train": ["x"]}).launch)
    monkeypatch.setattr("fivefold.plan.run_rates.on_gpus", lambda *_: True)
    monkeypatch.setattr("fivefold.plan.run_rates.gpu_kind", lambda _: H200)
    counts = {}
    for cores in (2, 4, 64):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        counts[cores], why = decide(config, spec_of(config))
        assert ("this machine's cores are enough for" in why) is (cores < 64)
    assert counts[2] == 1 < counts[4] == 2 <= counts[64]


def test_devices_without_rates_get_one_process(run):
    config = replace(run(), launch=RunConfig.of(model={"path": "x"}, data={"train": ["x"]}).launch)
    config = replace(config, trainer=replace(config.trainer, device="cpu"))
    changed, why = decided(config, spec_of(config))
    assert changed.engine.processes == 1 and why == "engine.processes: auto is 1, as for devices without known rates"


def test_an_engine_that_cannot_share_a_gpu_gets_one_process_without_a_second_note(run):
    for engine in ({"backend": "transformers"}, {"backend": "vllm", "url": "http://127.0.0.1:1"}):
        config = run(engine={**engine, "processes": "auto"})
        assert decide(config, spec_of(config)) == (1, "")


def test_rates_that_cannot_be_read_keep_no_run_from_starting(run, monkeypatch, tmp_path):
    bad = tmp_path / "calibration.json"
    bad.write_text("{}")
    monkeypatch.setattr("fivefold.plan.efficiency.CALIBRATION", bad)
    config = run()
    count, why = decide(config, spec_of(config))
    assert count == 1 and "no time is estimated" in why and "calibration.json" in why


def test_a_number_stays_what_it_is(run):
    config = run(engine={"processes": 3})
    assert decided(config, spec_of(config)) == (config, "")


def test_check_and_the_summary_show_the_number_with_its_reason(run):
    config = run()
    write_headers(Path(config.model.path))
    count, why = decide(config, spec_of(config))
    findings = check(config)
    assert why in findings.notes
    assert any(note.startswith("a step takes about ") for note in findings.notes)
    changed, _ = decided(config, spec_of(config))
    lines = describe(changed, spec_of(config), steps=1, prompts=1, dropped=0, validation=0, processes=why).splitlines()
    place = next(place for place, line in enumerate(lines) if line.startswith("engine"))
    assert f"as {count} servers each on the policy's ranks" in lines[place] and lines[place + 1].strip() == why
    # What check counts is what the run will hold.
    assert findings.summary == check(changed).summary != check(run(engine={"processes": 1})).summary
    elsewhere = replace(config, model=replace(config.model, path="Nobody/None"))
    assert any(note.startswith("engine.processes: auto is decided when the run starts") for note in check(elsewhere).notes)


def test_plan_writes_the_number_into_the_run_that_it_proposes(run, capsys, tmp_path):
    model = run().model.path
    arguments = ["plan", "--model", model, "--gpus", "1", "--gpu", H200, "--top", "1", "--json", "data.prompts_per_step=64",
                 "algorithm.group_size=16", "data.max_prompt_tokens=200", "data.max_response_tokens=400",
                 "engine.max_num_seqs=1024", "data.train=[rows.jsonl]"]  # fmt: skip
    assert cli.main(arguments) == 0
    (proposal,) = json.loads(capsys.readouterr().out)["runs"]
    assert proposal["run"]["engine"]["processes"] > 1
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(proposal["run"]))
    again = RunConfig.from_yaml(file)
    assert again.engine.processes == proposal["run"]["engine"]["processes"]
    assert cli.main([argument for argument in arguments if argument != "--json"]) == 0
    assert f"vllm:d1 colocated, {again.engine.processes} processes: " in capsys.readouterr().out


@pytest.mark.parametrize("value", [0, 17, "many", 1.5])
def test_other_values_are_refused(run, value):
    with pytest.raises(ConfigError, match=r"engine\.processes must be"):
        run(engine={"processes": value})
