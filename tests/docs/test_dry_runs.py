"""The dry runs of benchmarks that need a GPU: each trains or samples with a tiny model on a CPU and prints its rows."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import transformers

from benchmarks import recipes
from benchmarks.all_on_gpus import Job, run
from benchmarks.engine_limit import GROUPS
from tests.support.commands import python

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

pytestmark = pytest.mark.slow


def printed(script: str, *arguments: object) -> str:
    """What a dry run prints, which must succeed."""
    done = python(BENCHMARKS / script, *arguments, "--dry-run")
    assert done.returncode == 0 and "FAIL" not in done.stdout, done.stdout + done.stderr
    assert "CPU" in done.stdout.splitlines()[0] and "commit" in done.stdout.splitlines()[0]
    return done.stdout


def test_the_recipes_train_their_warm_start_and_print_every_evaluation(tmp_path):
    """Both tasks; the run that evaluates part of the problems evaluates all of them at its end."""
    shown = printed("recipes.py", tmp_path / "out")
    for name in ("words-sft-0", "words-grpo-0", "gsm8k-sft-0", "gsm8k-grpo-0"):
        assert f"\n{name}: 4 steps, " in shown
        evaluated = re.findall(rf"^{name}: step +(\d) +\d+ s  greedy \d\.\d{{4}} ± .*mean@4 \d\.\d{{4}} ± ", shown, re.M)
        assert evaluated == (["2", "4"] if name == "gsm8k-sft-0" else ["0", "2", "4"])
        curve = json.loads((tmp_path / f"out/curves/{name}.json").read_text())
        assert [row[0] for row in curve["rewards"]] == [1, 2, 3, 4] and curve["peak_gib"] > 0
        assert bool(curve["whole"]) == (name == "gsm8k-grpo-0")
    assert shown.count("\n  last  ") == 4 and shown.count("\n  all test problems  greedy") == 1


def test_adapters_arrive_in_bfloat16_only_as_fivefold_rounds_them(tmp_path):
    recipes.write_data(tmp_path, None, None, dry=True)
    directory = tmp_path / recipes.MODEL
    transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="bfloat16").save_pretrained(directory)
    done = python(BENCHMARKS / "adapter_rounding.py", directory, "--rates", 1e-6, "--updates", 1, 3)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^lr 1e-06, (\d) updates, (\S+) +arrives +(\S+)  log-probs (\S+)  KL (\S+)$", done.stdout, re.M)
    assert [row[:2] for row in rows] == [(n, way) for n in ("1", "3") for way in ("none", "nearest", "Fivefold's")]
    for none, nearest, ours in (rows[:3], rows[3:]):
        assert float(none[2]) == 0 and float(nearest[2]) < 0.7 and abs(float(ours[2]) - 1) < 0.1
        assert float(ours[3]) < 0.5 * float(nearest[3]) < float(none[3])


def test_commands_that_begin_at_once_share_the_warm_start_that_one_of_them_trains(tmp_path):
    with ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(
                printed, "recipes.py", tmp_path / "out", "--recipes", "words-grpo", "--first-seed", seed, "--shared-by", 2
            )
            for seed in (0, 1)
        ]  # fmt: skip
        shown = [run.result() for run in runs]
    assert sum("\nwords-sft-0: step" in text for text in shown) == 1
    assert sum("words-sft-0: " in text and " is there\n" in text for text in shown) == 1
    assert all(f"\nwords-grpo-{seed}: 4 steps, " in text for seed, text in enumerate(shown))
    for seed in (0, 1):
        curve = json.loads((tmp_path / f"out/curves/words-grpo-{seed}.json").read_text())
        assert curve["hardware"].endswith(", shared by 2 runs")


def test_seeds_that_run_at_once_have_a_curve_each_and_say_what_they_shared(tmp_path):
    shown = printed("recipes.py", tmp_path / "out", "--recipes", "words-grpo", "--seeds", 2, "--at-once")
    assert ", shared by 2 runs; commit" in shown.splitlines()[0]
    assert shown.count("\nwords-sft-0: step") == 3
    for seed in (0, 1):
        assert f"\nwords-grpo-{seed}: 4 steps, " in shown
        curve = json.loads((tmp_path / f"out/curves/words-grpo-{seed}.json").read_text())
        assert curve["hardware"].endswith(", shared by 2 runs")
        assert [row["step"] for row in curve["evaluations"]] == [0, 2, 4]


def test_a_run_that_fails_after_an_evaluation_makes_the_command_fail(tmp_path):
    """Its reward ends the process that computes it, after the first evaluations."""
    reward = tmp_path / "reward.py"
    reward.write_text("""
calls = 0


def ends(**_):
    global calls
    calls += 1
    if calls > 40:
        raise SystemExit(3)
    return 0.0
""")
    options = ["--recipes", "words-grpo", "--set", f"words-grpo:reward.functions={{'{reward}:ends': 1.0}}"]
    done = python(BENCHMARKS / "recipes.py", tmp_path / "out", *options, "--dry-run")
    assert done.returncode == 1 and "\nFAIL words-grpo-0: " in done.stdout
    assert "\nwords-grpo-0: step    0 " in done.stdout


def test_a_stop_lets_the_run_save_and_leaves_no_half_warm_start(tmp_path):
    """Every command that follows would start from an unfinished warm start."""
    command = [sys.executable, BENCHMARKS / "recipes.py", tmp_path / "out", "--dry-run"]
    command += ["--set", "words-sft:trainer.steps=400"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("words-sft-0: step    2 "):
            process.terminate()
            break
    rest = process.stdout.read()
    assert process.wait(120) == 128 + signal.SIGTERM
    assert "words-sft-0: its time is over" in rest
    assert list((tmp_path / "out/words/sft-0/checkpoints").iterdir())
    assert not (tmp_path / "out/words/warm").exists() and not (tmp_path / "out/words/grpo-0").exists()


@pytest.mark.parametrize("sides", ["fivefold", pytest.param("fivefold,trl", marks=pytest.mark.environments)])
def test_the_comparison_with_trl_trains_each_side_and_prints_its_steps(tmp_path, sides):
    if "trl" in sides and importlib.util.find_spec("trl") is None:
        pytest.skip("needs TRL, which the environment of `make test-environments` has")
    shown = printed("beside_trl.py", tmp_path / "out", "--sides", sides, "--steps", 6, "--eval-every", 3)
    for side in sides.split(","):
        assert f"\nbeside-{side}-0: 6 steps, " in shown
        assert re.findall(rf"^beside-{side}-0: step +(\d) .*mean@4 ", shown, re.M) == ["0", "3", "6"]
        assert re.search(rf"^beside-{side}-0: \d+\.\d\d s a step = .* samples/s, .* tokens/s, peak ", shown, re.M)
    assert ("of TRL's time" in shown) == ("trl" in sides)


@pytest.mark.parametrize("sides", ["fivefold", pytest.param("fivefold,trl", marks=pytest.mark.environments)])
def test_sides_that_share_the_machine_have_curves_but_their_times_are_not_compared(tmp_path, sides):
    if "trl" in sides and importlib.util.find_spec("trl") is None:
        pytest.skip("needs TRL, which the environment of `make test-environments` has")
    shown = printed("beside_trl.py", tmp_path / "out", "--sides", sides, "--steps", 4, "--seeds", 2, "--at-once")
    for side in sides.split(","):
        assert all((tmp_path / f"out/curves/beside-{side}-at-once-{seed}.json").exists() for seed in (0, 1))
        assert re.search(rf"^mean reward of steps 3 to 4: .*{side} \d.*\(2 seeds\)", shown, re.M)
    assert "of TRL's time" not in shown


def test_roles_on_other_layouts_and_ranks_are_those_on_one_layout():
    """Updates, and samples and first step of a whole run; what needs vLLM is named where it is not installed."""
    shown = printed("role_layouts.py", "equal", "roll", "--seconds", 1200)
    assert len(re.findall(r"^ok   policy, reference, critic on .*: two updates of one process: ", shown, re.M)) == 5
    for part in ("the samples of one-layout", "the first step of one-layout"):
        assert f"\nok   two-layouts: {part}: " in shown
    assert re.findall(r"^(\w+)-layouts?, step (\d): ", shown, re.M) == [
        (run, step) for run in ("two", "one") for step in "12"
    ]
    assert re.search(r'^two-layouts: memory: \{"peak_gib": \d\.\d+, "estimated_gib": \{"training": ', shown, re.M)


def test_the_memory_of_roles_is_measured_on_each_pair_of_layouts():
    shown = printed("role_layouts.py", "memory", "--seconds", 600)
    assert len(re.findall(r'^ok   policy, reference on .*: {"peak_gib": \[.*\], "estimated_gib": ', shown, re.M)) == 4


def test_tensors_go_from_half_of_the_ranks_to_the_others():
    """By one sender and by both, each next to one broadcast."""
    shown = printed("wire_sync.py", "wire", "--seconds", 600)
    senders = re.findall(r'^(\d) of 2 send: {"senders": \1, "receivers": 2, .*"parts": .*"broadcast": ', shown, re.M)
    assert senders == ["1", "2"]


def test_a_checkpoint_is_loaded_as_it_was_saved_between_steps():
    shown = printed("checkpoint_speed.py", "one", "--seconds", 600)
    assert "\nok   what was loaded is what was saved: true\n" in shown
    assert shown.count("GB a second: ") == 3 and shown.count("pause in seconds, below") == 2


def test_parts_of_a_training_step_are_measured_one_by_one():
    parts = ("small", "critic", "experts", "shared-prefix", "offload", "deterministic")
    shown = printed("training_speed.py", *parts, "--seconds", 600)
    attentions = re.findall(r'^(\w+\.?\w*), 8 x 24, .*, attention ([\w-]+): {"seconds": .*"host_ms": {"aten::', shown, re.M)
    models = ("smollm2_135m", "qwen3_0.6b")
    assert attentions == [(model, attention) for model in models for attention in ("flash-attn-4", "torch")]
    assert shown.count("\nok   log-probs are those of samples alone: ") == 2
    assert re.search(r'^ok   memory is as estimated: {"peak_gib": ', shown, re.M)
    assert re.search(r'^experts, TFLOP/s: {"grouped": ', shown, re.M)
    assert re.findall(r'^offload (\w+\.?\w*): {"gib": ', shown, re.M) == ["qwen3_moe", "qwen3_1.7b"]
    assert len(re.findall(r'^qwen3(?:_moe)?, deterministic: {.*"same_bits": true', shown, re.M)) == 2


def test_steps_of_fsdp_layouts_are_compared_with_other_trainers():
    shown = printed("fsdp_speed.py", "--seconds", 600)
    for what in ("transformers", "fsdp:d1", "megatron:d1", "fsdp:d2", "megatron:d2 and megatron:t2", "weights of fsdp:d2"):
        assert re.search(rf'^{what}: \[?{{"seconds": ', shown, re.M), what


def test_a_layer_of_stale_weights_is_seen_in_every_statistic_of_the_gate():
    """The engine with the trainer's weights differs from it by rounding; faults differ by a thousand times as much."""
    shown = printed("gate_statistics.py", "0.6b", "--seconds", 600)
    rows = {name: json.loads(row) for name, row in re.findall(r"^    (\w+, [^:]*): ({.*})$", shown, re.M)}
    healthy = rows["float32, healthy"]
    for fault in ("a layer's weights stale", "a layer's weights off by 10 %", "rope base / 100"):
        for name in ("mean", "kl", "bounded_kl", "k2", "total_variation", "max"):
            assert rows[f"bfloat16, {fault}"][name] > 5 * rows["bfloat16, healthy"][name]
    assert all(rows["float32, rope base / 100"][name] > 1000 * healthy[name] for name in ("mean", "kl", "max"))
    assert "healthy, vLLM" in shown


@pytest.mark.vllm
def test_a_judge_and_models_on_other_ranks_give_the_step_of_one_rank():
    shown = printed("role_layouts.py", "judged", "--seconds", 1400)
    for part in ("the samples of together", "the first step of together"):
        assert f"\nok   apart: {part}: " in shown
    (verdicts,) = re.findall(r'"reward/judge": \[([\d.]+), ([\d.]+)\]', shown)
    assert verdicts[0] == verdicts[1] and 0 < float(verdicts[0]) < 1


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed")
def test_parts_that_need_sglang_are_named_where_it_is_missing():
    shown = printed("sglang_servers.py")
    for part in (
        "trainer d1, sglang:d1t1, float32",
        "sglang:d1t2",
        "sglang:d2t1",
        "apart",
        "a server of 2 is killed",
        "ahead",
        "key",
    ):
        assert re.search(rf"{part}[^\n]*: skipped: SGLang is not installed", shown), (part, shown)
    assert "sglang, t2: skipped" in shown and "experts: skipped on a CPU" in shown


@pytest.mark.sglang
def test_servers_of_sglang_have_the_trainer_s_weights_and_log_probs_after_each_sync():
    shown = printed("sglang_servers.py", "one", "--seconds", 1400)
    assert "float32: four syncs, weights equal bit by bit; log-probs: " in shown


@pytest.mark.vllm
def test_the_limit_of_an_engine_is_measured_alone_and_in_ours(tmp_path):
    names = ["small-alone", "small-ours"]
    shown = printed("engine_limit.py", *names, "--seconds", 1500, "--group-seconds", 700)
    rows = [json.loads(line) for line in shown.splitlines() if line.startswith("{")]
    for name in names:
        measured = [(row["row"], row["sequences"]) for row in rows if row["group"] == name and row["row"] != "start"]
        assert measured == [(row, sequences) for sequences in GROUPS[name].sequences for row in GROUPS[name].rows]
    rates = {(row["row"], row["sequences"]): row["tokens_per_second"] for row in rows if row["row"] != "start"}
    assert all(rate > 0 for rate in rates.values()) and "not measured" not in shown
    for sequences in (256, 1024):
        (compared,) = re.findall(rf"^small, {sequences} sequences: (.*)$", shown, re.M)
        rates_of_row = json.loads(compared)
        assert (rates_of_row["vllm_alone"], rates_of_row["ours"]) == (rates["plain", sequences], rates["after", sequences])
        assert rates_of_row["of_alone"] == pytest.approx(rates_of_row["ours"] / rates_of_row["vllm_alone"], abs=1e-3)


def test_jobs_for_gpus_run_one_after_the_other_within_their_time(tmp_path):
    """One that runs on a CPU too; the others are named with the reason why they were not measured."""
    done = python(BENCHMARKS / "all_on_gpus.py", tmp_path, "fsdp-one", "fsdp-two", "experts", "--gpus", 1, "--seconds", 400)
    endings = done.stdout.splitlines()[-3:]
    assert re.fullmatch(r"fsdp-one +ended well after \d+ s", endings[0]), done.stdout + done.stderr
    assert [ending.split(maxsplit=1)[1] for ending in endings[1:]] == ["not measured: needs 2 GPUs, 1 are there"] * 2
    assert done.returncode == 1 and "hardware: 1 x CPU" in (tmp_path / "fsdp-one.txt").read_text()


def test_a_job_that_takes_too_long_is_ended_with_what_it_started(tmp_path):
    (tmp_path / "sleep.py").write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\nchild.wait()\n"
    )
    job = Job("sleep", 1, 2.0, f"{tmp_path}/sleep.py")
    assert run(job, tmp_path, 2.0, {}) == "cut off at its limit"
    child = int((tmp_path / "sleep.txt").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
