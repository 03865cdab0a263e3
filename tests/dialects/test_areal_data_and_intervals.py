"""What AReaL's configurations say of data sets of the hub, and of epochs between checkpoints and evaluations."""

from __future__ import annotations

import json

import pytest

from fivefold.data.prepare import prepare
from fivefold.data.rows import read_rows
from tests.support.dialects import config, translated

RL = """
experiment_name: e
trial_name: t
actor: {path: m, backend: "megatron:d4", kl_ctl: 0.0}
rollout: {backend: "vllm:d4"}
train_dataset: {path: openai/gsm8k, type: rl, batch_size: 16, max_length: 512}
valid_dataset: {path: openai/gsm8k, type: rl, batch_size: 16}
gconfig: {n_samples: 4, max_new_tokens: 512}
"""
SFT = """
experiment_name: e
trial_name: t
actor: {path: m, backend: "megatron:d4"}
train_dataset: {path: openai/gsm8k, type: sft, batch_size: 16, max_length: 512}
"""


def trainer_of(*words: str):
    return config("areal", *words, tree=RL).trainer


def test_gsm8k_by_its_hub_name_is_the_file_that_fivefold_prepares_in_areal_s_form(tmp_path):
    data = config("areal", tree=RL).data
    assert (data.train, data.val) == (["data/gsm8k-areal/train.parquet"], ["data/gsm8k-areal/test.parquet"])
    source = tmp_path / "train.jsonl"
    source.write_text(json.dumps({"question": "How many?", "answer": "It is 1 + 1.\n#### 2"}) + "\n")
    for form, prompt in (
        ("areal", "How many?\nPlease put your final answer within \\boxed{}."),
        ("verl", 'How many? Let\'s think step by step and output the final answer after "####".'),
    ):
        prepare("gsm8k", tmp_path / form, [source, source], form=form)
        row = next(read_rows(tmp_path / form / "train.parquet"))
        assert row["prompt"] == [{"role": "user", "content": prompt}] and row["reward_model"]["ground_truth"] == "2"
    with pytest.raises(ValueError, match="--form areal is a form of gsm8k: got math"):
        prepare("math", tmp_path, [source], form="areal")


def test_areals_sft_on_gsm8k_learns_the_solution_after_the_bare_question():
    data = config("areal", tree=SFT).data
    assert (data.prompt_key, data.response_key, data.apply_chat_template) == ("extra_info.question", "response", False)
    assert config("areal", "train_dataset.path=d.parquet", tree=SFT).data.apply_chat_template is True


def test_a_file_or_directory_of_a_similar_name_stays_what_it_is():
    assert config("areal", "train_dataset.path=/data/gsm8k/train.parquet", tree=RL).data.train == [
        "/data/gsm8k/train.parquet"
    ]


@pytest.mark.parametrize(
    ("words", "save", "evaluate"),
    [
        ([], 0, 0),
        (["saver.freq_epochs=1", "evaluator.freq_epochs=1"], "epoch", "epoch"),
        (["saver.freq_steps=7", "evaluator.freq_steps=3"], 7, 3),
        (["recover.mode=auto", "recover.freq_epochs=1"], "epoch", 0),
        (["recover.freq_epochs=1"], 0, 0),
        (["recover.mode=auto", "recover.freq_steps=5", "saver.freq_epochs=1"], "epoch", 0),
    ],
)
def test_areals_epochs_between_checkpoints_and_evaluations_are_ours(words, save, evaluate):
    trainer = trainer_of(*words)
    assert (trainer.save_every, trainer.eval_every) == (save, evaluate)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("saver.freq_epochs=2", "every 2 epochs"),
        ("evaluator.freq_secs=60", "seconds between"),
        ("saver.freq_secs=60", "seconds between"),
    ],
)
def test_an_interval_of_areals_that_is_another_here_is_said(word, says):
    (outcome,) = [
        outcome for outcome in translated("areal", word, tree=RL).outcomes if outcome.key == word.partition("=")[0]
    ]
    assert outcome.kind == "unsupported" and says in outcome.reason and not outcome.changes_result
