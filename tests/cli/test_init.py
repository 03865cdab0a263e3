"""`fivefold init` writes runs that can start."""

from __future__ import annotations

import io
import json

import pytest
import yaml

from fivefold import cli
from fivefold.commands.proposals import propose_model
from fivefold.config import RunConfig
from fivefold.plan.check import check
from tests.support.tiny_models import make_model, make_tokenizer

USUAL = {"data_source": "openai/gsm8k", "prompt": "1+1=", "reward_model": {"ground_truth": "2"}}
ROWS = {
    "of this project": USUAL,
    "gsm8k as it is": {"question": "1+1=", "answer": "1+1 is\n#### 2"},
    "math as it is": {"problem": "1+1=", "solution": "it is \\boxed{2x}", "answer": "2x"},
    "messages": {"messages": [{"role": "user", "content": "1+1="}], "ground_truth": 2},
    "to imitate": {"instruction": "1+1=", "output": "2"},
    "conversations": {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]},
    "pairs": {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
}
FOUND = {
    "of this project": ("grpo", {}, {}),
    "gsm8k as it is": ("grpo", {"prompt_key": "question", "ground_truth_key": "answer"}, {"gsm8k": 1.0}),
    "math as it is": ("grpo", {"prompt_key": "problem", "ground_truth_key": "answer"}, {"math": 1.0}),
    "messages": ("grpo", {"prompt_key": "messages", "ground_truth_key": "ground_truth"}, {"gsm8k": 1.0}),
    "to imitate": ("sft", {}, {}),
    "conversations": ("sft", {}, {}),
    "pairs": ("dpo", {}, {}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = make_model("qwen3", tmp_path_factory.mktemp("init") / "model")
    make_tokenizer(path)
    return path


def write_rows(path, row, count=40):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([json.dumps(row)] * count))
    return path


def init(*arguments: object) -> int:
    return cli.main(["init", *map(str, arguments)])


@pytest.mark.parametrize("kind", ROWS)
def test_columns_and_task_are_found_and_the_run_can_start(tmp_path, monkeypatch, capsys, model, kind):
    monkeypatch.chdir(tmp_path)
    data = write_rows(tmp_path / "rows.jsonl", ROWS[kind])
    more = ["--method", "sft"] if kind == "to imitate" else []
    assert init("--model", model, "--data", data, "--gpus", 0, "--yes", *more) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "next     fivefold train run.yaml"
    tree, (method, keys, rewards) = yaml.safe_load((tmp_path / "run.yaml").read_text()), FOUND[kind]
    assert tree["algorithm"]["name"] == method
    assert {key: value for key, value in tree["data"].items() if key.endswith("_key")} == keys
    assert tree.get("reward", {}).get("functions", {}) == rewards
    findings = check(RunConfig.from_yaml(tmp_path / "run.yaml"))
    assert (findings.errors, findings.ignored) == ([], [])
    assert cli.main(["check", "run.yaml"]) == 0


@pytest.mark.parametrize(
    ("flags", "layout", "lacks"),
    [
        (["--gpus", 1], "megatron:d1", []),
        (["--gpus", 4, "--method", "ppo"], "megatron:d4", []),
        (["--gpus", 2, "--engine", "vllm"], "megatron:d2", ["engine.backend"]),
        (["--gpus", 0, "--engine", "sglang", "--method", "dapo"], "megatron:d1", []),
        (["--reward", "gsm8k,format", "--gpus", 0], "megatron:d1", []),
    ],
)  # fmt: skip
def test_every_choice_gives_a_run_that_lacks_at_most_a_package(tmp_path, capsys, model, flags, layout, lacks):
    out = tmp_path / "new" / "run.yaml"
    assert init(out, "--model", model, "--data", write_rows(tmp_path / "rows.jsonl", USUAL), *flags, "--yes") == 0
    config = RunConfig.from_yaml(out)
    assert config.policy.backend == layout
    findings = check(config)
    assert [error.partition(":")[0].partition(" ")[0] for error in findings.errors] == lacks
    assert all("is not installed" in error or "not installed here" in error for error in findings.errors)


def test_answers_are_asked_for_again_until_they_hold(tmp_path, monkeypatch, capsys, model):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "data/train.jsonl", USUAL)
    write_rows(tmp_path / "data/test.jsonl", USUAL)
    answers = [f"{tmp_path}/none", str(model), "", "nonsense", "format", "many", "0", "vlm", "transformers"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(answers) + "\n"))
    assert init() == 0
    output = capsys.readouterr().out
    for wrong in (
        "Model must be a directory",
        "Reward cannot be 'nonsense'",
        "GPUs must be a number",
        "did you mean 'vllm'?",
    ):
        assert wrong in output
    config = RunConfig.from_yaml(tmp_path / "run.yaml")
    assert (config.model.path, config.data.train, config.data.val) == (str(model), ["data/train.jsonl"], ["data/test.jsonl"])
    assert config.reward.functions == {"format": 1.0}


REWARD = "def f(completions, **kwargs): return [0.0]\n"


@pytest.mark.parametrize(
    ("row", "answers", "method"),
    [
        ({"question": "1+1=", "answer": "#### 2"}, [""], "grpo"),
        ({"question": "1+1=", "answer": "#### 2"}, ["ppo", "sft"], "sft"),
        ({"prompt": "1+1=", "response": "2"}, [""], "sft"),
        ({"prompt": "1+1=", "completion": "2"}, ["grpo"], "grpo"),
        ({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, [], "dpo"),
        ({"prompt": "1+1="}, [], "grpo"),
    ],
)
def test_init_asks_whether_responses_in_the_rows_are_to_be_imitated(
    tmp_path, monkeypatch, capsys, model, row, answers, method
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(REWARD)
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{answer}\n" for answer in [*answers, "mine.py:f", "", ""])))
    data = write_rows(tmp_path / "rows.jsonl", row)
    assert init("--model", model, "--data", data, "--gpus", 0, "--engine", "transformers") == 0
    output = capsys.readouterr().out
    assert ("Method: " in output) == bool(answers) and ("Method must be one of grpo, sft" in output) == ("ppo" in answers)
    config = RunConfig.from_yaml(tmp_path / "run.yaml")
    assert config.algorithm.name == method and check(config).errors == []
    assert config.data.response_key == (
        "completion"
        if method == "sft" and "completion" in row
        else "response"
        if "question" not in row or method != "sft"
        else "answer"
    )


def test_prompts_alone_are_taken_with_a_reward_that_needs_no_truth(tmp_path, monkeypatch, capsys, model):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(REWARD)
    flags = ["--model", model, "--data", write_rows(tmp_path / "rows.jsonl", {"prompt": "1+1="}), "--gpus", 0, "--yes"]
    for more, says in (
        (
            [],
            "--reward must be named: the rows have no ground truth; name its column with --answer-key, or a path.py:function",
        ),
        (["--reward", "mine.py:f,math"], "--reward cannot be math: the rows have no ground truth; name its column"),
        (["--reward", "by-source"], "--reward cannot be by-source: the rows have no ground truth"),
    ):
        assert init(*flags, *more) == 2
        assert says in capsys.readouterr().err
    for reward in ("mine.py:f", "format"):
        assert init(*flags, "--reward", reward, "--force") == 0
        config = RunConfig.from_yaml(tmp_path / "run.yaml")
        assert (config.reward.functions, config.data.ground_truth_key) == ({reward: 1.0}, "reward_model.ground_truth")
        assert check(config).errors == []


def test_models_that_are_here_are_proposed(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert propose_model() == "Qwen/Qwen3-0.6B"
    for name, family in (("A/strange", "strange"), ("B/Small-7B", "llama")):
        snapshot = tmp_path / f"cache/models--{name.replace('/', '--')}/snapshots/abc"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps({"model_type": family}))
    assert propose_model() == "B/Small-7B"
    (tmp_path / "models/mine").mkdir(parents=True)
    (tmp_path / "models/mine/config.json").write_text('{"model_type": "qwen3"}')
    assert propose_model() == "models/mine"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "init needs an answer to: Model"),
        (["--yes", "--method", "grppo"], "did you mean 'grpo'?"),
        (["--yes", "--gpus", "-1"], "--gpus must be a number"),
        (
            ["--yes", "--data", "rows.csv"],
            "--data must be a parquet or jsonl file, a directory of `save_to_disk`, or "
            "[modelscope:]OWNER/NAME[:CONFIG][/SPLIT][@REVISION] of a hub",
        ),
        (["--yes", "--data", "odd.jsonl"], "must hold a pair to compare or a prompt or a prompt and a response"),
        (["--yes", "--data", "none.jsonl", "--model", "gone"], "--model must be a directory or a hub id"),
        (["taken.yaml", "--yes"], "taken.yaml is there already"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(tmp_path, monkeypatch, capsys, flags, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    (tmp_path / "taken.yaml").write_text("kept")
    write_rows(tmp_path / "odd.jsonl", {"a": "b"})
    assert init(*flags) == 2
    message = capsys.readouterr().err
    assert says in message and message.count("\n") == 1
    assert (tmp_path / "taken.yaml").read_text() == "kept" and not (tmp_path / "run.yaml").exists()


def test_data_that_is_still_to_be_written_comes_next(tmp_path, monkeypatch, capsys, model):
    monkeypatch.chdir(tmp_path)
    assert init("--yes", "--model", str(model)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["next     fivefold data gsm8k --out data/gsm8k", "next     fivefold check run.yaml"]
