"""Command lines and YAML of TRL that mean harm end in a run or in sentences, in bounded time and memory."""

from __future__ import annotations

import time

import pytest

from fivefold.config.loader import ConfigError
from fivefold.errors import UserError
from fivefold.terminal import plain
from tests.support.dialects import translate_words, translated
from tests.support.hostile_trl import FILES, Trl

M = "model_name_or_path: m\ndataset_name: a/b\nreward_funcs: accuracy_reward\n"
SECONDS = 30
FAULTS = {
    "max_grad_norm: .nan": "max_grad_norm must be a number: got 'nan'",
    "max_grad_norm: .inf": "max_grad_norm must be a number: got 'inf'",
    "num_train_epochs: 1e999": "num_train_epochs must be a number: got '1e999'",
    "eval_strategy: steps\neval_steps: .nan": "eval_steps must be a number: got 'nan'",
    "reward_weights: [x]": "reward_weights must be a number: got 'x'",
    "reward_weights: [[1]]": "reward_weights must be a number: got [1]",
    "reward_weights: [.nan]": "reward_weights must be a number: got nan",
    "datasets: [{path: json, data_files: 3}]": "name, split and data_files of json in datasets must be texts",
    "datasets: [{path: x, name: [1], split: {}}]": "name, split and data_files of x in datasets must be texts",
    "datasets: [x]": "datasets must be a list of mappings with a path: got 'x'",
    "datasets: {path: x}": "datasets",
}


@pytest.mark.parametrize("yaml", FAULTS)
def test_a_value_of_another_kind_is_refused_in_a_sentence_that_names_it(yaml):
    translation = translated("trl", tree=f"{M}{yaml}\n")
    assert any(FAULTS[yaml] in sentence for sentence in translation.refusals), translation.refusals


@pytest.mark.parametrize("name", FILES)
def test_yaml_that_means_harm_is_read_or_refused_in_seconds(name):
    begin = time.thread_time()
    try:
        translated("trl", tree=f"{M}{FILES[name]}")
    except (ConfigError, UserError) as error:
        assert str(error)
    assert time.thread_time() - begin < SECONDS


def test_half_a_letter_of_a_command_line_reaches_no_terminal():
    """Bytes that are no UTF-8 arrive as such halves, and so do escapes of YAML."""
    for word in ("\udcff", "\ud800"):
        translation = translate_words("trl", ["trl", "grpo", "--model_name_or_path", f"m{word}", "--dataset_name", "a"], {})
        plain("".join([*translation.refusals, str(translation.tree)])).encode()
        assert plain(f"a{word}") == f"a\\u{ord(word):04x}"


def test_whatever_is_translated_is_the_run_of_its_yaml_and_all_else_is_a_sentence(tmp_path):
    """`benchmarks/attacks.py` makes more of them."""
    attack = Trl(tmp_path)
    outcomes = [attack(number) for number in range(60)]
    assert [fault for _, fault in outcomes if fault] == []
    assert {kind for kind, _ in outcomes} == {"accepted", "refused"}


def test_a_list_for_the_program_and_a_number_of_5000_digits_are_refused():
    with pytest.raises(UserError, match=r"the program of TRL must be one of grpo, dpo, sft; got \['grpo'\]"):
        translated("trl", tree=f"{M}'-m': [grpo]\n")
    words = ["trl", "sft", "--model_name_or_path", "m", "--dataset_name", "a/b", "--lr_scheduler_type", "9" * 5000]
    assert any("lr_scheduler_type" in sentence for sentence in translate_words("trl", words, {}).refusals)
