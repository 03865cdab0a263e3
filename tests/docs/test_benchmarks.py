"""Scripts of benchmarks/ that measure on GPUs: each part has a dry run on a CPU, which computes the same with tiny sizes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from benchmarks import all_on_gpus, harness, quickstart, start_up
from benchmarks.beside_trl import mean_distance
from fivefold_dialects import SYSTEMS
from tests.support.commands import program

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "benchmarks").glob("[!_]*.py"))
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("benchmarks/*.md")]
COMMAND = re.compile(r"python (?:-m )?benchmarks[./](\w+)(?:\.py)?([^`#\n]*)|`(\w+)\.py ([^`]*)`")
"""A script by its path, as a module, or by its name alone in code of a text; then its arguments."""


def lines_of(module: str, *arguments: object) -> list[str]:
    done = program(f"benchmarks.{module}", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def printed_commands() -> list[tuple[str, str, list[str]]]:
    """Return (file that prints a command of a benchmark, name of its script, its arguments) for each such command."""
    texts = {path: path.read_text() for path in [*PAGES, ROOT / "Makefile"]}
    texts |= {path: path.read_text().split('"""')[1] for path in SCRIPTS}
    texts[ROOT / "benchmarks/all_on_gpus.py"] += "".join(f"\npython {job.command}" for job in all_on_gpus.JOBS)
    return [
        (str(path.relative_to(ROOT)), name or short, shlex.split((words or more).replace("[", " ").replace("]", " ")))
        for path, text in texts.items()
        for name, words, short, more in COMMAND.findall(text)
        if name or (ROOT / f"benchmarks/{short}.py").is_file()
    ]


def test_each_printed_command_names_a_script_with_its_parts_and_options():
    commands = printed_commands()
    assert {"training_speed", "attacks", "quickstart", "turns", "fsdp_speed"} <= {name for _, name, _ in commands}
    harness = (ROOT / "benchmarks/harness.py").read_text()
    for place, name, words in commands:
        script = ROOT / f"benchmarks/{name}.py"
        assert script.is_file(), (place, name)
        text = script.read_text()
        text += harness if "benchmarks.harness import" in text else ""
        for before, word in zip(["", *words], words, strict=False):
            if word.startswith("--"):
                assert f'"{word}"' in text, (place, name, word)
            elif re.fullmatch(r"[a-z0-9][a-z0-9.-]*", word) and not before.startswith("--"):
                assert f'"{word}"' in text or f"def {word}(" in text or word in SYSTEMS, (place, name, word)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_that_is_run_by_its_path_finds_what_it_imports_of_the_repository(script):
    text = script.read_text()
    is_run_by_path = f"python benchmarks/{script.name}" in text
    imports = re.search(r"^ *(from|import) (tests|benchmarks)\b", text, re.M)
    assert not (is_run_by_path and imports) or "sys.path" in text


@pytest.mark.slow
def test_long_sequences_and_experts_are_measured_on_two_ranks():
    lines = lines_of("training_speed", "long", "experts-model", "--seconds", 500)
    assert not any(line.startswith("FAIL") or "not measured" in line for line in lines), lines
    for length, samples in ((256, 2), (1024, 1)):
        equal = [line for line in lines if line.startswith(f"ok   {samples} x {length}: c2 computes the update of c1")]
        assert len(equal) == 1
        assert {f"{samples} x {length}, {layout}" for layout in ("c1", "c2")} <= {line.partition(":")[0] for line in lines}
    assert any(line.startswith('d2e2: {"seconds"') and "estimated_gib" in line for line in lines)


@pytest.mark.slow
def test_agents_that_append_train_one_sequence_of_the_last_context_s_length(tmp_path):
    from benchmarks.turns import trained

    sequences, tokens = trained(tmp_path)
    assert sequences == 1.0 and 1.0 <= tokens <= 1.01


@pytest.mark.slow
def test_a_start_is_measured_by_parts_with_cold_and_with_warm_caches():
    lines = lines_of("start_up", "1.7b", "--seconds", 1000)
    for caches in ("cold", "warm"):
        (line,) = [line for line in lines if f"{caches} caches: " in line and "by parts" in line]
        parts = json.loads(line.partition("by parts: ")[2])
        names = list(parts)
        assert (names[0], names[-1]) == ("launch", "first_response") and {"models", "engine"} <= parts.keys()
        assert len([line for line in lines if f"{caches} caches, step " in line]) == 3
    assert any("seconds to the first response, cold and warm" in line for line in lines)


@pytest.mark.slow
def test_the_readme_s_quickstart_runs_word_for_word(tmp_path):
    lines = lines_of("quickstart", tmp_path / "out", "--dry-run")
    for line in quickstart.commands():
        assert any(printed.startswith(f"$ {line}") for printed in lines), line
    assert lines[-1] == "101 rows of metrics, all steps; a model was exported"


def test_the_commands_of_the_quickstart_are_those_of_the_readme():
    commands = quickstart.commands()
    assert [line.split()[1] for line in commands] == ["data", "check", "train", "watch", "report", "eval", "export"]
    readme = (quickstart.HERE / "README.md").read_text()
    assert all(f"    {line}" in readme for line in commands) and not any("#" in line for line in commands)
    example = quickstart.configuration(commands)
    assert quickstart.MODEL in (quickstart.HERE / example).read_text()


def measured(file: str, name: str) -> dict[str, float]:
    """Return the numbers of a file of results that follow a name at the beginning of a line."""
    [row] = re.findall(rf"^{re.escape(name)}: *(\{{.*\}})", (ROOT / "benchmarks/results" / file).read_text(), re.M)
    return json.loads(row)


@pytest.mark.parametrize(
    ("title", "ours", "tokens", "theirs"),
    [
        ("Qwen3-1.7B's shape, 8 x 4096 tokens", "8 x 4096, recomputation none, attention flash-attn-4", 8 * 4096, "8 x 4096, transformers"),
        ("the same with full recomputation", "8 x 4096, recomputation full, attention flash-attn-4", 8 * 4096, "8 x 4096, transformers"),
        ("Qwen3-0.6B's shape, 64 x about 1024 tokens", "d1", 67543, "training step with transformers"),
    ],
)  # fmt: skip
def test_a_row_of_the_readme_s_speeds_has_the_numbers_of_its_results_file(title, ours, tokens, theirs):
    [cells] = re.findall(rf"^\| {title} \| (.*) \| (.*?) ?\|$", (ROOT / "README.md").read_text(), re.M)
    row, other = measured("h200-step.txt", ours), measured("h200-step.txt", theirs)
    speed, speed_of_other = tokens / row["seconds"], other["tokens_per_second"]

    def shown(number: float) -> str:
        return f"{float(f'{number:.3g}'):,.0f}"

    assert cells[0] == f"{shown(speed)} (**{speed / speed_of_other:.2f} x**), {row['peak_gib']:.1f} GiB"
    assert cells[1] in ("", f"{shown(speed_of_other)}, {other['peak_gib']:.1f} GiB")


def test_the_readme_s_numbers_of_the_demo_are_those_of_its_ten_seeds():
    lines = re.findall(
        r"^seed (\d+) .*, grpo (\d+) steps, .* mean@4 (\S+) .*?(\S+)$", (ROOT / "benchmarks/results/demo-seeds.txt").read_text(), re.M
    )  # fmt: skip
    page = " ".join((ROOT / "README.md").read_text().split())
    [(first, last, least, most)] = re.findall(
        r"from (\S+) to (\S+) within (\d+) to (\d+) steps with each of ten seeds", page
    )
    assert {int(seed) for seed, *_ in lines} == set(range(10))
    steps = [int(steps) for _, steps, *_ in lines]
    assert (int(least), int(most)) == (min(steps), max(steps))
    assert all(abs(float(begin) - float(first)) < 0.051 and float(end) >= float(last) for *_, begin, end in lines)


def test_the_bridges_page_has_the_numbers_of_its_results_file():
    page = (ROOT / "docs/bridges.md").read_text()
    fsdp, core, weights = (measured("h200-fsdp.txt", name) for name in ("fsdp:d2", "megatron:d2", "weights of fsdp:d2"))
    [(step_of_core, step, share, peak, peak_of_core)] = re.findall(
        r"on two H200s, d2 \| (\S+) \|.*\| (\S+) \((\S+) of the speed, with (\S+) instead of (\S+) GiB\)", page
    )
    assert (step_of_core, step) == (f"{core['seconds']:.2f}", f"{fsdp['seconds']:.2f}")
    assert share == f"{core['seconds'] / fsdp['seconds']:.2f}"
    assert (peak, peak_of_core) == (f"{fsdp['peak_gib']:.1f}", f"{core['peak_gib']:.1f}")
    assert f"| {weights['seconds']:.2f} s |" in page


def test_what_vllm_says_of_its_start_is_read_from_its_log():
    """Lines as releases 0.26 to 0.32 write them; a model whose parts are compiled one by one has several."""
    log = """
INFO 11-26 10:00:01 [gpu_model_runner.py:5149] Model loading took 3.22 GiB memory and 1.250000 seconds
INFO 11-26 10:00:20 [monitor.py:53] torch.compile took 12.50 s in total
INFO 11-26 10:00:21 [monitor.py:53] torch.compile took 0.50 s in total
INFO 11-26 10:00:30 [gpu_model_runner.py:6581] Graph capturing finished in 9 secs, took 0.61 GiB
INFO 11-26 10:00:31 [core.py:395] init engine (profile, create kv cache, warmup model) took 30.75 s (compilation: 13.00 s)
"""
    assert start_up.vllm_parts(log) == {
        "reading weights": 1.25, "compiling": 13.0, "graphs": 9.0, "profile, cache and warm-up": 30.75,
    }  # fmt: skip
    assert start_up.vllm_parts("nothing") == {}


def test_jobs_may_be_named_after_the_options(tmp_path):
    shown = program("benchmarks.all_on_gpus", tmp_path, "--gpus", 0, "--seconds", 5, "start-up-1.7b", "fsdp-two")
    assert re.findall(r"^(\S+): not measured: needs \d GPUs, 0 are there$", shown.stdout, re.M) == [
        "start-up-1.7b",
        "fsdp-two",
    ]


def test_a_failure_is_printed_with_the_exceptions_that_caused_it():
    message = "rank 0 failed:\n  File a\nValueError: cause\n  torch.OutOfMemoryError: x\nmuch more\nended\nkilled"
    assert harness.shortened(message) == "ValueError: cause / torch.OutOfMemoryError: x / ended / killed"
    assert harness.shortened("no result") == "no result"


def test_the_distance_of_log_probs_is_a_mean_over_the_sampled_tokens():
    """Padding and log-probs that are no numbers do not count."""
    trained_BT = torch.tensor([[-1.5, -2.0, -9.0], [-3.0, -9.0, -9.0]])
    assert mean_distance([[-1.0, -2.0], [-3.0]], trained_BT) == pytest.approx(0.5 / 3)
    assert mean_distance([[-1.0, None], [-3.0]], trained_BT) == pytest.approx(0.5 / 2)
