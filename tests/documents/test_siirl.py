"""siiRL's page about its Megatron-LM backend: its commands, its script and its settings, with the sizes of a toy."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest

from tests.documents.pages import (
    SETTINGS,
    check_change,
    check_commands,
    for_a_toy,
    in_small,
    make_run,
    settings,
    text,
    train,
)
from tests.support.commands import fivefold
from tests.support.dialects import HOME, translate_words

PAGE = "siirl-megatron-backend"
SMALL = {
    "TRAIN_BATCH_SIZE_PER_NODE": 4, "PPO_MINI_BATCH_SIZE_PER_NODE": 2, "PPO_MICRO_BATCH_SIZE_PER_GPU": 2, "MAX_PROMPT_LENGTH": 160,
    "MAX_RESPONSE_LENGTH": 8, "ROLLOUT_N": 2, "SAVE_FREQ": 1, "TEST_FREQ": 1, "TOTAL_EPOCHS": 1, "MAX_CKPT_KEEP": 1,
    "ACTOR_REF_TP": 2, "ACTOR_REF_PP": 2, "N_GPUS_PER_NODE": 4, "CKPT_PATH": "$HOME/runs/page",
}  # fmt: skip

COMMANDS = {
    "cd examples/data_preprocess": ["siirl-6"], "python3 deepscaler.py": ["siirl-6"], "huggingface-cli download": ["siirl-7"],
    "modelscope download": ["siirl-8"], "python3 -m siirl.main_dag": ["siirl-9"], "tensorboard --logdir": ["siirl-35"],
}  # fmt: skip
"""How a command of the page begins -> the rows of docs/documents.md that answer it."""


def script(**variables: object) -> str:
    """The page's script, with other values of some of its variables, and a time that stands still."""
    page = text(PAGE)
    whole = page[page.index("#!/usr/bin/env bash") : page.index("\nStep 4")] + "\n"
    return in_small(whole, {"timestamp": "now", **variables})


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """The directories of the page with a tiny model, and DeepScaleR's rows as its preprocessing script writes them."""
    root = tmp_path_factory.mktemp("siirl")
    (root / "run.sh").write_text(script(**SMALL))
    make_run(root)
    (root / "data/models").mkdir(parents=True)
    (root / "model").rename(root / "data/models/Qwen3-8B")
    # A token is a character here, and sums are shorter than the set's problems.
    rows = [{"problem": f"{a}+{b}=", "answer": str(a + b), "solution": ""} for a in range(5) for b in range(2)]
    (root / "deepscaler.json").write_text(json.dumps(rows))
    done = fivefold("data", "deepscaler", "--source", root / "deepscaler.json", "--out", root / "data/datasets/deepscaler")
    assert done.returncode == 0, done.stderr
    return root


@pytest.fixture(scope="module")
def page_run(root):
    """The page's script, of which steps, lengths and sizes are those of a toy; and the cache of an engine on a CPU."""
    return train(root, "page", "siirl", root / "run.sh", "--env", f"HOME={root}", *for_a_toy(root, "trainer.steps=2"))


def test_deepscaler_is_prepared_as_the_page_s_first_command_does(root):
    assert "deepscaler.py --local_dir" in text(PAGE)
    assert sorted(path.name for path in (root / "data/datasets/deepscaler").iterdir()) == ["test.parquet", "train.parquet"]


def test_the_script_of_the_page_trains_in_small(root, page_run):
    rows, run, told = page_run
    assert "of siirl's keys 34 translated, 8 fixed here, 0 not supported, 0 unknown" in told
    assert [row["step"] for row in rows] == [0, 1, 2], "step 0 is the validation before training"
    assert all("val/deepscaler/reward" in row for row in rows) and max(row["policy/grad_norm"] for row in rows[1:]) > 0
    assert (run["policy"]["backend"], run["engine"]["backend"]) == ("megatron:d1t2p2", "vllm:d2t2")
    assert (run["algorithm"]["updates_per_step"], run["algorithm"]["group_size"], run["trainer"]["keep"]) == (2, 2, 1)
    assert run["trainer"]["loggers"] == ["console", "tensorboard"]
    assert "         3     t1 p1" in told, told
    assert [path.name for path in sorted((root / "runs/page/checkpoints").glob("step-*"))] == ["step-000002"]


def test_tensorboard_serves_the_reward_the_loss_and_the_kl_of_the_run(root, page_run):
    """`tensorboard --logdir`, asked as its page in the browser does."""
    from tensorboard import program

    board = program.TensorBoard()
    board.configure(argv=[None, "--logdir", str(root / "tensorboard"), "--port", "0", "--load_fast", "false"])
    with urllib.request.urlopen(f"{board.launch()}data/plugin/scalars/tags", timeout=60) as answer:
        tags = {tag for names in json.load(answer).values() for tag in names}
    assert {"reward/mean", "policy/loss", "policy/kl_old"} <= tags, tags


def test_the_page_s_command_again_resumes_its_run(root, page_run):
    """`trainer.resume_mode=auto`: the same command continues, with one step more."""
    rows, _, told = train(
        root, "page", "siirl", root / "run.sh", "--env", f"HOME={root}", *for_a_toy(root, "trainer.steps=3")
    )  # fmt: skip
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and "step-000002" in told


def test_every_command_of_the_page_has_its_row():
    check_commands(PAGE, "siirl", COMMANDS)


def test_the_settings_that_are_changed_are_those_of_the_page(tmp_path):
    (tmp_path / "run.sh").write_text(script())
    outcomes = translate_words("siirl", [str(tmp_path / "run.sh")], HOME).outcomes
    printed = {outcome.key: outcome.value for outcome in outcomes if outcome.key != "-m"}
    listed = {key: pair[0] for key, pair in SETTINGS["siirl"]["flips"].items()}
    assert {key: str(value) for key, value in printed.items()} == {key: str(listed[key]) for key in printed}
    # The steps before the script turn on what it leaves off.
    assert set(listed) == {*printed, *re.findall(r"(actor_rollout_ref[\w.]+)=", text(PAGE))}


@pytest.mark.parametrize("key", settings("siirl"))
def test_every_setting_of_the_page_acts_or_the_report_says_why_not(tmp_path, key):
    """Changed by a word after the page's own script, or as a variable that the script exports."""

    def translate(flipped):
        changed = {flipped: SETTINGS["siirl"]["flips"][flipped][1]} if flipped else {}
        changed |= SETTINGS["siirl"]["next_to"].get(key, {})
        (tmp_path / "run.sh").write_text(script(**changed) if key.isupper() else script())
        words = [] if key.isupper() else [f"{name}={value}" for name, value in changed.items()]
        return translate_words("siirl", [str(tmp_path / "run.sh"), *words], HOME)

    check_change("siirl", key, translate)
