"""Whole runs from the command line: layouts, resume, kills, faults, signals."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.commands import (
    LONGEST,
    Command,
    children_of,
    fivefold,
    gone,
    is_free,
    program,
    python,
    wait_for,
    with_cpu_seconds,
)
from tests.support.documented import undocumented
from tests.support.whole_runs import assert_same, make_model, metrics, write_run

RUN = """
policy: {backend: "megatron:d1", tokens_per_micro_batch: 64, optimizer: {warmup_steps: 2}}
algorithm: {name: grpo, group_size: 4, updates_per_step: 2, kl: {coef: 0.1}}
data: {val: [$ROOT/data/test.parquet], prompts_per_step: 8, max_response_tokens: 12}
eval: {samples: 2, max_prompts: 6}
trainer: {steps: 5, eval_every: 2}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    make_model(root)
    write_run(root, RUN)
    return root


def train(root: Path, name: str, *overrides: str, run=fivefold) -> subprocess.CompletedProcess[str]:
    return run("train", root / "run.yaml", f"trainer.run_dir={root}/runs/{name}", *overrides)


def from_the_shell(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A command in a fresh interpreter, which starts its ranks as fresh interpreters."""
    return program("fivefold.cli", *arguments)


@pytest.fixture(scope="module")
def base(root: Path) -> list[dict[str, float]]:
    """One rank, as a user starts it: whatever forked runs are compared with it shows that forking changes nothing."""
    done = train(root, "base", "trainer.save_every=2", "trainer.keep=10", run=from_the_shell)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    # The estimate of the memory is a table, and stands there once.
    assert done.stdout.count("on the fullest rank") == 1 and re.search(r"\n +training +[\d.]+", done.stdout), done.stdout
    return metrics(root, "base")


def test_a_run_writes_what_it_promises(root, base):
    run = root / "runs/base"
    assert [row["step"] for row in base] == [0, 1, 2, 3, 4, 5]
    for name in (
        "reward/mean", "reward/std", "reward/max", "policy/loss", "policy/kl_reference", "policy/entropy", "policy/ratio_mean",
        "policy/clip_fraction", "policy/grad_norm", "policy/lr", "rollout/logprob_diff_mean", "rollout/logprob_diff_max",
        "rollout/kl", "response/length_mean", "response/truncated_fraction", "prompt/length_mean", "epoch",
    ):  # fmt: skip
        assert name in base[-1], name
    assert base[0].keys() >= {
        "val/arithmetic/accuracy",
        "val/arithmetic/reward",
        "val/arithmetic/mean@2",
        "val/arithmetic/pass@2",
    }
    assert [row["policy/lr"] for row in base[1:]] == pytest.approx([1e-3, 1e-3, 1e-3, 1e-3, 1e-3])
    raw = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {
        "time/rollout",
        "time/reward",
        "time/train",
        "time/weight_sync",
        "throughput/tokens_per_second",
        "memory/peak_gb",
    } <= set(raw[-1])
    assert base[-1]["rollout/logprob_diff_max"] < 1e-5
    assert undocumented(name for row in raw for name in row) == []
    assert (run / "run.yaml").is_file()
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert len(samples) >= 20 and all(row["prompt"] == row["question"] + "\n" for row in samples)
    assert {len(row["group_rewards"]) for row in samples} == {len(row["group_lengths"]) for row in samples} == {1, 4}
    assert all(
        (row["reward"], row["response_tokens"]) == (row["group_rewards"][0], row["group_lengths"][0]) for row in samples
    )
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["latest", "step-000002", "step-000004", "step-000005"]
    report = fivefold("report", run, "--plot", "reward/mean")
    assert report.returncode == 0, report.stderr
    page = (run / "report.html").read_text()
    assert '"timeline": {"steps": [' in page and '"state": "finished"' in page and '"reason": ""' in page
    assert "://" not in page.replace("http://www.w3.org", "")


@pytest.mark.parametrize(("layout", "run"), [("megatron:d2", from_the_shell), ("megatron:c2", fivefold)])
def test_a_whole_run_has_the_same_metrics_on_other_layouts(root, base, layout, run):
    """Tensor- and pipeline-parallel ranks take part in the run below that moves; single steps in test_step_equality."""
    done = train(root, layout.replace(":", "-"), f"policy.backend={layout}", run=run)
    assert done.returncode == 0, done.stderr
    assert_same(metrics(root, layout.replace(":", "-")), base)


@pytest.fixture(scope="module")
def moved(root: Path) -> list[dict[str, float]]:
    """The run of `base` in three pieces, each on another layout."""
    for steps, layout in [(2, "megatron:t2"), (3, "megatron:p2"), (5, "megatron:d2")]:
        # The schedule's length must not depend on where this piece of the run stops.
        done = train(root, "moved", f"policy.backend={layout}", f"trainer.steps={steps}", "policy.optimizer.decay_steps=10")
        assert done.returncode == 0, done.stderr
    return metrics(root, "moved")


def test_a_run_resumed_on_other_layouts_continues_as_if_never_stopped(base, moved):
    row_of_step = {row["step"]: row for row in moved}
    for row in base[1:]:
        shared = {k: v for k, v in row.items() if not k.startswith("val/")}
        assert_same([{k: row_of_step[row["step"]][k] for k in shared}], [shared])


def exported(root: Path, name: str, step: int, out: str) -> dict[str, torch.Tensor]:
    done = fivefold("export", root / f"runs/{name}/checkpoints/step-{step:06d}", root / out)
    assert done.returncode == 0, done.stderr
    return load_file(root / out / "model.safetensors")


def test_parameters_after_resuming_elsewhere_equal_those_of_one_run(root, base, moved):
    """Moments and Adam's step came along: otherwise the updates after the resume would differ."""
    one, pieces = exported(root, "base", 5, "out-base"), exported(root, "moved", 5, "out-moved")
    for name, tensor in one.items():
        assert torch.allclose(pieces[name], tensor, atol=2e-6), name


def test_an_exported_model_loads_in_transformers_with_its_tokenizer(root, base):
    import transformers

    exported(root, "base", 4, "out-hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "out-hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "out-hf")
    assert model.config.vocab_size == len(tokenizer)
    again = fivefold("export", root / "runs/base/checkpoints/step-000004", root / "out-hf")
    assert again.returncode == 2
    assert "is not empty" in again.stderr


@pytest.mark.slow
def test_a_run_from_a_checkpoint_of_megatron_core_is_the_one_from_the_same_weights(root, base):
    exported(root, "base", 2, "from")
    done = fivefold("export", root / "runs/base/checkpoints/step-000002", root / "from-megatron", "--to", "megatron")
    assert done.returncode == 0 and "torch_dist checkpoint of Megatron-Core" in done.stdout, done.stderr
    for name in ("from", "from-megatron"):
        done = train(root, name, f"model.path={root / name}", "trainer.steps=1", "policy.backend=megatron:p2")
        assert done.returncode == 0, done.stderr
    assert_same(metrics(root, "from-megatron"), metrics(root, "from"), rel=0)
    assert torch.equal(*(exported(root, name, 1, f"{name}-1")["model.norm.weight"] for name in ("from", "from-megatron")))


def hang_before_step_4_is_saved():
    from fivefold.checkpoint.checkpoints import Checkpoints

    stage = Checkpoints.stage

    def until_step_4(self, step, parts):
        return time.sleep(LONGEST) if step == 4 else stage(self, step, parts)

    Checkpoints.stage = until_step_4


def hang_while_step_4_is_saved():
    from fivefold.checkpoint.checkpoints import Checkpoints

    publish = Checkpoints.publish

    def until_step_4(self, state, files):
        return time.sleep(LONGEST) if state.step == 4 else publish(self, state, files)

    Checkpoints.publish = until_step_4


def hang_while_step_2_and_4_are_written():
    from fivefold.checkpoint import saving

    measured = saving.entry_of

    def slow(path):
        # Step 2 is there when step 4 begins.
        return time.sleep(LONGEST if "step-000004" in str(path) else 0.5 * ("step-000002" in str(path))) or measured(path)

    saving.entry_of = slow


@pytest.mark.parametrize(
    ("hang", "reached", "override"),
    [
        (hang_before_step_4_is_saved, "checkpoints/step-000002", "trainer.async_save=false"),
        (hang_while_step_4_is_saved, "checkpoints/.step-000004.partial/run.yaml", "trainer.async_save=false"),
        # The run continued, and waits at its end.
        (hang_while_step_2_and_4_are_written, "checkpoints/.step-000004.partial/run.yaml", "trainer.async_save=true"),
    ],
)
def test_a_run_killed_between_or_during_saves_resumes_with_the_same_metrics(root, base, hang, reached, override):
    name = hang.__name__
    run = root / "runs" / name
    overrides = ["trainer.save_every=2", "policy.backend=megatron:d2", override]
    process = Command("train", root / "run.yaml", f"trainer.run_dir={run}", *overrides, hook=hang)
    wait_for((run / reached).exists, process)
    wait_for((run / "checkpoints/latest").exists, process)
    if override == "trainer.async_save=true":
        wait_for(lambda: metrics(root, name)[-1]["step"] == 5, process)
    everyone = children_of(process.pid)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # A process whose first thread has ended has its files until the last one has.
    wait_for(lambda: gone(everyone) and is_free(run))
    done = train(root, name, *overrides)
    assert done.returncode == 0, done.stderr
    assert "resumed after step 2" in done.stdout, done.stdout
    assert_same(metrics(root, name), base)


def test_what_is_saved_in_the_background_is_what_is_saved_at_once(root, base):
    """Bit for bit, although the next step changes the weights before they are written."""
    name = "background"
    overrides = [f"trainer.run_dir={root}/runs/{name}", "trainer.save_every=2", "trainer.keep=10", "trainer.async_save=true"]
    done = Command("train", root / "run.yaml", *overrides, hook=write_late).finish()
    assert done.returncode == 0, done.stderr
    paths = sorted((root / "runs/base/checkpoints").glob("step-*/policy/*"))
    assert len(paths) > 4
    for path in paths:
        other = root / "runs" / name / path.relative_to(root / "runs/base")
        assert other.read_bytes() == path.read_bytes(), path
    assert_same(metrics(root, name), base)


def write_late():
    from fivefold.backend import shares

    write = shares.Share.write

    def late(self, path):
        time.sleep(0.5)
        return write(self, path)

    shares.Share.write = late


def fail_to_write_step_4():
    from fivefold.backend import shares

    write = shares.write_pieces

    def full(path, pieces):
        if "000004" in str(path) and "00001.safetensors" in path.name:
            raise OSError(28, "No space left on device", str(path))
        write(path, pieces)

    shares.write_pieces = full


@pytest.mark.parametrize("in_background", [pytest.param("true", marks=pytest.mark.slow), "false"])
def test_a_full_disk_ends_the_run_with_one_sentence_and_keeps_the_last_checkpoint(root, base, in_background):
    name = f"full-{in_background}"
    overrides = ["trainer.save_every=2", "policy.backend=megatron:d2", f"trainer.async_save={in_background}"]
    done = Command(
        "train", root / "run.yaml", f"trainer.run_dir={root}/runs/{name}", *overrides, hook=fail_to_write_step_4
    ).finish()
    assert done.returncode != 0
    assert "the checkpoint of step 4 could not be written; rank 1: " in done.stderr
    assert "rank-00001.safetensors: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    done = train(root, name, *overrides)
    assert "resumed after step 2" in done.stdout, done.stdout + done.stderr
    assert_same(metrics(root, name), base)


def test_a_cut_distribution_does_not_end_the_run_and_shows_in_its_log_probs(root, base):
    done = train(root, "cut", "engine.sampling.top_p=0.5", "trainer.steps=1", "trainer.eval_every=0")
    assert done.returncode == 0, done.stderr
    # Half of the probability at most is left out: log-probs are further apart than rounding, and than the gate allows.
    assert 1e-2 < metrics(root, "cut")[-1]["rollout/logprob_diff_max"] <= 0.7


def test_a_damaged_checkpoint_is_named_and_skipped_for_the_one_before(root, base):
    import shutil

    run = root / "runs/damaged"
    shutil.copytree(root / "runs/base", run)
    part = max((run / "checkpoints/step-000005/policy").glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(part.read_bytes())
    # In the data of a tensor, which ranks check while they read it.
    content[len(content) // 2] ^= 1
    part.write_bytes(bytes(content))
    (run / "checkpoints/step-000004/manifest.json").unlink()
    done = train(root, "damaged")
    assert done.returncode == 0, done.stderr
    assert f"{part.parent.name}/{part.name} has other content" in done.stdout
    assert "step-000004 is damaged and skipped: manifest.json is missing" in done.stdout
    assert "resumed after step 2" in done.stdout
    assert_same(metrics(root, "damaged"), base)
    named = train(root, "damaged-2", f"trainer.resume={run}/checkpoints/step-000003")
    assert named.returncode == 2
    assert "trainer.resume must be auto, never or a checkpoint directory" in named.stderr


ENDLESS = "trainer.steps=100000"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_all_ranks_after_a_checkpoint(root, base, number, code):
    name = f"signal-{number.name}"
    process = Command(
        "train", root / "run.yaml", f"trainer.run_dir={root}/runs/{name}", "policy.backend=megatron:d2", ENDLESS
    )  # fmt: skip
    path = root / "runs" / name / "metrics.jsonl"
    wait_for(lambda: path.is_file() and '"step": 2,' in path.read_text(), process)
    everyone = children_of(process.pid)
    process.send_signal(number)
    done = process.finish()
    assert done.returncode == code, done.stdout + done.stderr
    assert "saved" in done.stdout
    last = json.loads(path.read_text().splitlines()[-1])["step"]
    (saved,) = (root / "runs" / name / "checkpoints").glob("step-*")
    state = json.loads((saved / "state.json").read_text())
    # The metrics of a step whose evaluation was interrupted are in its checkpoint: the row is written on resume.
    assert state["step"] == last + (state["pending"] is not None), (last, state)
    wait_for(lambda: gone(everyone))
    reason = {"SIGTERM": "asked to end by SIGTERM", "SIGINT": "asked to end by Ctrl-C"}[number.name]
    assert f"{reason}: the run saves its state and ends" in done.stdout and ("SIGTERM" in done.stdout) == (
        number.name == "SIGTERM"
    )
    # The last line resumes the run as it stands there.
    resumed = Command(*shlex.split(done.stdout.splitlines()[-1])[1:])
    wait_for(lambda: f'"step": {state["step"] + 1},' in path.read_text(), resumed)
    resumed.send_signal(number)
    assert f"resumed after step {state['step']} " in resumed.finish().stdout


INTERRUPTED = """
from fivefold import RunConfig, train

if __name__ == "__main__":
    train(RunConfig.from_yaml("{root}/run.yaml", ["trainer.run_dir={root}/runs/asked", "trainer.steps=100000"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_from_python_that_is_asked_to_end_raises_how_to_resume_it(root, number):
    run_dir = root / "runs/asked"
    shutil.rmtree(run_dir, ignore_errors=True)
    (root / "interrupted.py").write_text(INTERRUPTED.format(root=root))
    process = subprocess.Popen([sys.executable, root / "interrupted.py"], stderr=subprocess.PIPE, text=True)
    path = run_dir / "metrics.jsonl"
    wait_for(lambda: path.is_file() and '"step": 1,' in path.read_text(), process)
    process.send_signal(number)
    *_, reason, command = process.communicate(timeout=LONGEST)[1].splitlines()
    error, name = {signal.SIGINT: ("KeyboardInterrupt", "Ctrl-C")}.get(number, ("fivefold.errors.RunError", "SIGTERM"))
    assert reason == f"{error}: the run was asked to end by {name}; to resume it:"
    assert command == f"fivefold train {run_dir}/run.yaml"
    # A shell sees a program that Ctrl-C ended.
    assert process.returncode == (-signal.SIGINT if number == signal.SIGINT else 1)


def test_a_run_that_never_resumes_is_told_how_to(tmp_path):
    from fivefold.config import RunConfig
    from fivefold.launch.start import resume_command

    config = RunConfig.of(
        model={"path": "m"}, data={"train": ["a.jsonl"]}, trainer={"run_dir": f"{tmp_path}/a b", "resume": "never"}
    )
    assert resume_command(config) == ""
    (tmp_path / "a b/checkpoints").mkdir(parents=True)
    for name in ("run.yaml", "checkpoints/latest"):
        (tmp_path / "a b" / name).touch()
    assert resume_command(config) == f"fivefold train '{tmp_path}/a b/run.yaml' trainer.resume=auto"


def test_an_exception_in_one_rank_ends_the_run_with_its_traceback(root, base, tmp_path):
    """In fresh interpreters: nothing of the run, only Python's own hook, makes rank 1 fail. Rank 0 would wait for hours."""
    hook = tmp_path / "sitecustomize.py"
    hook.write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    from fivefold.megatron.model import MegatronModel\n"
        "    def fail(*a, **k): raise RuntimeError('planted in rank 1')\n"
        "    MegatronModel.train_step = fail\n"
    )
    before = os.environ.get("PYTHONPATH")
    done = program(
        "fivefold.cli", "train", root / "run.yaml", f"trainer.run_dir={tmp_path}/run", "policy.backend=megatron:d2",
        "trainer.eval_before_train=false", "launch.timeout_minutes=600",
        env={"PYTHONPATH": os.pathsep.join([str(tmp_path), *([before] if before else [])])},
    )  # fmt: skip
    assert done.returncode == 1
    assert "rank 1 failed" in done.stderr
    assert "RuntimeError: planted in rank 1" in done.stderr
    assert (tmp_path / "run/logs/rank-1.error").is_file()


def test_killing_the_launcher_leaves_no_process_over(root, base):
    """In fresh interpreters: which files a rank inherits decides whether it notices."""
    arguments = ["train", root / "run.yaml", f"trainer.run_dir={root}/runs/orphans", "policy.backend=megatron:d2", ENDLESS]
    process = subprocess.Popen(
        [sys.executable, "-m", "fivefold.cli", *map(str, arguments)],
        stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    path = root / "runs/orphans/metrics.jsonl"
    wait_for(lambda: path.is_file() and '"step": 1,' in path.read_text(), process)
    everyone = children_of(process.pid)
    assert len(everyone) >= 2
    process.kill()
    process.wait()
    wait_for(lambda: gone(everyone))


FROM_PYTHON = """
from fivefold import Objective, RunConfig, make_objective, train

def digits(response):
    return sum(c.isdigit() for c in response) / 12

if __name__ == "__main__":
    config = RunConfig.from_yaml("{root}/run.yaml", ["trainer.run_dir={root}/runs/python", "trainer.steps=2", "reward.functions={{}}"])
    tree = {{"functions": {{digits: 1.0}}}}
    from dataclasses import asdict
    config = RunConfig.of(**{{**asdict(config), "reward": tree}})
    assert isinstance(make_objective("grpo", clip_high=0.28), Objective)
    print("ran in", train(config))
"""


@pytest.mark.slow
def test_a_run_from_python_with_a_function_as_reward_is_the_run_of_the_command_line(root, base):
    (root / "script.py").write_text(FROM_PYTHON.format(root=root))
    done = python(root / "script.py")
    assert done.returncode == 0, done.stderr
    assert f"ran in {root}/runs/python" in done.stdout

    def shared_part(row):
        # The reward's part has the name of the file that the function stands in, and the last step evaluates.
        return {k: v for k, v in row.items() if not k.startswith("val/") and ".py:" not in k}

    assert_same([shared_part(row) for row in metrics(root, "python")], [shared_part(row) for row in base[:3]])


def test_torchrun_joins_the_ranks_that_are_there(root, base):
    done = program(
        "torch.distributed.run", "--nproc-per-node", 2, "--standalone", "-m", "fivefold.cli",
        "train", root / "run.yaml", f"trainer.run_dir={root}/runs/torchrun", "policy.backend=megatron:t2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert_same(metrics(root, "torchrun"), base)


def test_an_engine_that_differs_from_the_trainer_stops_the_run_at_the_first_step(root):
    done = train(root, "gate", "engine.max_logprob_kl=1e-20")
    assert done.returncode == 1
    assert "engine's log-probs differ from the trainer's" in done.stderr
    assert "RoPE" in done.stderr
    assert not (root / "runs/gate/checkpoints").exists()


def test_a_resumed_run_compares_log_probs_before_its_first_step(root, base):
    """By what it samples for that alone: it draws no other samples than the run that was not stopped."""
    assert train(root, "compared", "trainer.steps=2").returncode == 0
    done = train(root, "compared", "trainer.steps=3", "trainer.accept_changes=[trainer]", "engine.max_logprob_kl=1e-20")
    assert done.returncode == 1 and "engine's log-probs differ from the trainer's" in done.stderr
    assert "over 16 tokens" not in done.stderr and len(metrics(root, "compared")) == 3
    done = train(root, "compared", "trainer.steps=3", "trainer.accept_changes=[trainer]")
    assert done.returncode == 0 and done.stdout.count("engine's log-probs agree with the trainer's") == 1


def test_a_first_step_of_equal_rewards_is_compared(root):
    """No sample of it has an advantage, so the trainer computes none of them for the step itself."""
    (root / "equal.py").write_text("def equal(**_): return 0.0\n")
    equal = ("reward.functions={'" + str(root / "equal.py") + ":equal': 1.0}", "algorithm.kl.coef=0", "trainer.steps=1")
    done = train(root, "equal", *equal, "trainer.eval_every=0", "engine.max_logprob_kl=1e-20")
    assert done.returncode == 1 and "engine's log-probs differ from the trainer's" in done.stderr, done.stderr


def test_a_goal_that_no_evaluation_measures_ends_the_run_after_the_first(root):
    done = train(root, "goal", "trainer.stop_at={val/arithmetic/acuracy: 0.9}")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "trainer.stop_at must name metrics of the evaluation: got 'val/arithmetic/acuracy': did you mean" in done.stderr
    assert "'val/arithmetic/accuracy'?; it has val/arithmetic/accuracy, " in done.stderr and "step 1 |" not in done.stdout


def test_a_run_that_has_reached_its_goal_ends_at_once_until_it_has_another(root):
    goal = ("trainer.stop_at={val/arithmetic/reward: 0}", "trainer.eval_every=1")
    first, again = train(root, "reached", *goal), train(root, "reached", *goal)
    for done in (first, again):
        assert done.returncode == 0 and "reached {'val/arithmetic/reward': 0.0} after step 1" in done.stdout, done.stderr
    assert "step 2 |" not in first.stdout + again.stdout and [row["step"] for row in metrics(root, "reached")] == [0, 1]
    other = train(root, "reached", "trainer.stop_at={val/arithmetic/reward: 9}", "trainer.eval_every=1", "trainer.steps=2")
    assert other.returncode == 0 and "step 2 |" in other.stdout, other.stderr


def test_a_run_that_ended_with_its_data_adds_nothing_when_it_is_started_again(root):
    """Only prompts with a 1 in them have rewards that differ: no step is known to be the last before it is over."""
    (root / "some.py").write_text("def some(prompt, response):\n    return len(response) * ('1' in prompt)\n")
    given = ["algorithm={name: dapo, group_size: 2, overlong_buffer: 0, prompts_per_round: 8}", "trainer.ends_with_data=true",
             f"reward.functions={{'{root}/some.py:some': 1.0}}", "trainer.eval_every=9", "trainer.save_every=1"]  # fmt: skip
    rows = []
    for _ in range(2):
        done = train(root, "used-up", *given)
        assert done.returncode == 0 and "the data of the run were used up after step" in done.stdout, (
            done.stdout + done.stderr
        )
        rows.append((root / "runs/used-up/metrics.jsonl").read_text())
    assert rows[0] == rows[1] and len(metrics(root, "used-up")) > 2


def test_eval_of_a_checkpoint_gives_the_numbers_of_the_run(root, base):
    everything = [path for path in (root / "runs/base").rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in everything}
    done = fivefold(
        "eval",
        root / "run.yaml",
        "--checkpoint",
        root / "runs/base/checkpoints/step-000004",
        f"trainer.run_dir={root}/runs/base",
    )
    assert done.returncode == 0, done.stderr
    now = [path for path in (root / "runs/base").rglob("*") if path.is_file()]
    assert {path: path.read_bytes() for path in now} == before, "evaluating changes nothing of the run, and adds nothing"
    numbers = json.loads(done.stdout[done.stdout.index("{") :])
    for key in ("val/arithmetic/accuracy", "val/arithmetic/mean@2", "val/arithmetic/reward"):
        assert numbers[key] == pytest.approx(base[4][key])


def test_profile_writes_a_trace_of_the_steps_and_ranks_that_were_named(root):
    done = train(
        root,
        "profiled",
        "trainer.steps=2",
        "policy.backend=megatron:d2",
        "trainer.profile.steps=[2]",
        "trainer.profile.ranks=[1]",
    )
    assert done.returncode == 0, done.stderr
    traces = sorted(path.name for path in (root / "runs/profiled/trace").glob("*rank*"))
    assert traces == ["step-000002-rank-1.json"]
    assert json.loads((root / "runs/profiled/trace" / traces[0]).read_text())["traceEvents"]


def test_bad_input_is_told_before_any_rank_starts(root):
    """By a process that never imports torch: it costs less than that import alone."""
    wrong = ["data.train=nowhere.parquet", "policy.backend=megatron:t3"]
    done, spent = with_cpu_seconds(lambda: train(root, "bad", *wrong, run=from_the_shell))
    assert done.returncode == 2
    imported, unit = with_cpu_seconds(lambda: python("-c", "import torch"))
    assert imported.returncode == 0 and spent < unit
    assert "no file at nowhere.parquet" in done.stderr
    assert "attention heads must be divisible by tp" in done.stderr
    assert not (root / "runs/bad/logs").exists()


@pytest.mark.parametrize(
    ("name", "raises", "says"),
    [
        ("trial", "True", "a reward function failed on a trial"),
        ("sample", "response != ground_truth", "the reward of 32 of 32 samples failed"),
    ],
)
def test_a_reward_function_that_raises_ends_the_run_with_its_traceback(root, name, raises, says):
    """The trial's response is the ground truth: one function fails there, before anything is sampled, the other on what the
    policy samples. Each writes into a file whether what it scores is the ground truth."""
    text = (
        "def broken(response, ground_truth):\n"
        f"    open('{root}/{name}.txt', 'a').write(f'{{response == ground_truth}}\\n')\n"
        f"    return unknown_name if {raises} else 1\n"
    )
    (root / f"{name}.py").write_text(text)
    done = train(root, name, f"reward.functions={{'{root}/{name}.py:broken': 1.0}}", "trainer.eval_before_train=false")
    assert done.returncode == 1
    assert says in done.stderr
    assert f"{name}.py" in done.stderr and "NameError: name 'unknown_name' is not defined" in done.stderr
    scored = (root / f"{name}.txt").read_text().split()
    assert scored.count("True") >= 1 and scored.count("False") == (0 if name == "trial" else 32), scored
    written = {path.name for path in (root / f"runs/{name}").rglob("*") if path.is_file() and path.stat().st_size}
    assert not {"metrics.jsonl", "samples.jsonl", "stages.jsonl"} & written, written


def test_resume_never_in_a_directory_with_newer_checkpoints_keeps_what_it_writes(root, base):
    import shutil

    run = root / "runs/again"
    shutil.copytree(root / "runs/base", run)
    done = train(root, "again", "trainer.resume=never", "trainer.steps=3", "trainer.save_every=1", "trainer.keep=2")
    assert done.returncode == 0, done.stderr
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == ["latest", "step-000002", "step-000003"]
    assert (run / "checkpoints/latest").read_text() == "step-000003"
    assert f"is now in {run}/superseded-1" in done.stdout
    assert (run / "superseded-1/checkpoints/step-000005/manifest.json").is_file()
    assert len((run / "superseded-1/metrics.jsonl").read_text().splitlines()) == len(base)
    assert_same(metrics(root, "again")[:3], base[:3])
    # From an older step: the row of step 3 and its samples move too, TensorBoard shows the new ones only.
    done = train(
        root, "again", f"trainer.resume={run}/checkpoints/step-000002", "trainer.steps=3", "trainer.loggers=[tensorboard]"
    )
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in metrics(root, "again/superseded-2")] == [3]
    assert (run / "superseded-2/checkpoints/step-000003/manifest.json").is_file()
    assert_same(metrics(root, "again")[:3], base[:3])
    assert [row["step"] for row in metrics(root, "again")] == [0, 1, 2, 3]


# --- experts, context parallelism, virtual stages, guards ------------------------------------------------------------


@pytest.fixture(scope="module")
def sparse(root: Path) -> list[dict[str, float]]:
    """A run of a model with experts on one rank; the others are compared with it."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "tokenizer")
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
        max_position_embeddings=64, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(root / "sparse")
    tokenizer.save_pretrained(root / "sparse")
    done = train(root, "sparse", *SPARSE.format(root=root).split())
    assert done.returncode == 0, done.stderr
    return metrics(root, "sparse")


SPARSE = "model.path={root}/sparse trainer.steps=3 trainer.save_every=2"


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        pytest.param("d2e2", "policy.backend=megatron:d2e2", marks=pytest.mark.slow),
        ("t2c2", "policy.backend=megatron:t2c2e2"),
    ],
)
def test_a_model_with_experts_learns_the_same_on_other_layouts(root, sparse, name, overrides):
    """Virtual stages take part in the run below that moves."""
    done = train(root, f"sparse-{name}", *SPARSE.format(root=root).split(), *overrides.split())
    assert done.returncode == 0, done.stderr
    assert_same(metrics(root, f"sparse-{name}"), sparse)
    assert sparse[-1]["moe/load_max"] >= 1.0


def test_a_run_with_experts_moves_to_another_layout_and_is_exported(root, sparse):
    """Step 2 of one rank, step 3 on four with experts cut over two and virtual stages; then a directory for others."""
    import shutil

    shutil.copytree(root / "runs/sparse", root / "runs/sparse-moved")
    shutil.rmtree(root / "runs/sparse-moved/checkpoints/step-000003")
    (root / "runs/sparse-moved/checkpoints/latest").write_text("step-000002")
    overrides = "policy.backend=megatron:d2p2e2 policy.megatron.pipeline.virtual_pipeline_model_parallel_size=2"
    done = train(root, "sparse-moved", *SPARSE.format(root=root).split(), *overrides.split())
    assert done.returncode == 0, done.stderr
    assert "resumed after step 2" in done.stdout + done.stderr
    assert_same(metrics(root, "sparse-moved"), sparse)
    done = fivefold("export", root / "runs/sparse-moved/checkpoints/step-000003", root / "sparse-out")
    assert done.returncode == 0, done.stderr
    weights, first = load_file(root / "sparse-out/model.safetensors"), load_file(root / "sparse/model.safetensors")
    assert set(weights) == set(first) and any(not torch.equal(weights[name], first[name]) for name in weights)


def test_updates_that_are_not_finite_end_the_run_with_the_batch_saved(root, base):
    # The largest reward that there may be: gradients of float32 overflow.
    (root / "huge.py").write_text("def huge(response):\n    return 1e37 * (len(response) % 2)\n")
    done = train(
        root,
        "infinite",
        f"reward.functions={{{root}/huge.py:huge: 1.0}}",
        "algorithm.normalize=none",
        "trainer.guard.max_skipped=1",
        "trainer.eval_before_train=false",
    )
    assert done.returncode == 1
    output = done.stdout + done.stderr
    assert "gradient norm inf (1 in a row)" in output and "2 updates of the policy in a row" in output
    saved = load_file(root / "runs/infinite/failed/step-000001/rank-0.safetensors")
    assert {"token_ids_T", "advantages_T", "loss_weights_T", "lengths_N"} <= set(saved)
    assert int(saved["lengths_N"].sum()) == len(saved["token_ids_T"])


def test_a_deterministic_run_gives_the_same_bits_twice(root, base):
    for name in ("twice-1", "twice-2"):
        done = train(
            root,
            name,
            "trainer.deterministic=true",
            "trainer.steps=3",
            "trainer.guard.every=1",
            "policy.backend=megatron:t2",
        )
        assert done.returncode == 0, done.stderr
    assert metrics(root, "twice-1") == metrics(root, "twice-2")


def test_the_ratio_of_a_sequence_is_that_of_its_tokens_on_all_context_parallel_ranks(root, base):
    for name, layout in (("gspo-1", "megatron:d1"), ("gspo-c2", "megatron:c2")):
        done = train(root, name, "algorithm.name=gspo", "trainer.steps=3", f"policy.backend={layout}")
        assert done.returncode == 0, done.stderr
    assert_same(metrics(root, "gspo-c2"), metrics(root, "gspo-1"))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["policy.backend=vllm:d2"], "a layout of a trainer, megatron or fsdp: got vllm:d2t1p1; write megatron:d2t1p1"),
        (["policy.backend=megatron:d2e2"], "qwen3 has no experts"),
        (["policy.backend=megatron:p2", "policy.megatron.pipeline.virtual_pipeline_model_parallel_size=2"], "divisible by the virtual"),
        (["policy.megatron.transformer.recompute_granularty=full"], "did you mean 'recompute_granularity'"),
        (["policy.recompute=full", "policy.megatron.transformer.recompute_granularity=selective"], "keep one"),
        (["policy.megatron.optimizer.optimizer_cpu_offload=true"], "needs policy.dtype: bfloat16"),
        (["policy.megatron.transformer.recompute_modules=[moe]"], "qwen3 has no moe"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_a_process_starts(root, overrides, says):
    done = fivefold("check", root / "run.yaml", *overrides)
    assert done.returncode in (1, 2)
    assert says in done.stdout + done.stderr


def test_keys_without_effect_are_reported(root):
    done = fivefold(
        "check", root / "run.yaml", "policy.offload.optimizer=true", "trainer.device=cpu",
        "policy.megatron.ddp.average_in_collective=true", "policy.megatron.transformer.moe_z_loss_coeff=0.1",
    )  # fmt: skip
    output = " ".join((done.stdout + done.stderr).split())
    for key in (
        "policy.offload.optimizer",
        "policy.megatron.ddp.average_in_collective",
        "policy.megatron.transformer.moe_z_loss_coeff",
    ):
        assert f"{key} has no effect" in output
