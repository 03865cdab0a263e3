r"""verl's rewards, by answers worked out by hand from its definitions (verl/utils/reward_score of 0.4.1 to 0.9.1)."""

from __future__ import annotations

import pytest

from fivefold.config.scoring import RewardConfig
from fivefold.reward.choose import choose_rewards
from fivefold.reward.rules import BUILT_IN, ground_truth_fault, resolve
from fivefold_dialects import writer
from tests.support.dialects import HOME, translate_words


@pytest.mark.parametrize(("response", "truth", "reward"), [
    ("so #### 42", "42", 1), ("#### 1,000", "1000", 1), ("#### 1,000", "1,000", 0), ("#### 42.", "42", 0),
    ("#### 42.0", "42", 0), ("####42", "42", 0), ("the answer is 42", "42", 0), (r"\boxed{42}", "42", 0),
    ("#### 41 no, #### 42", "42", 1), ("#### 42" + " " * 300, "42", 0), ("#### $42", "42", 0), ("#### -3", "-3", 1),
])  # fmt: skip
def test_verls_gsm8k_reads_the_last_number_after_hashes_as_text(response, truth, reward):
    assert resolve("verl_gsm8k")(response, truth) == reward


@pytest.mark.parametrize(("response", "truth", "reward"), [
    ("#### 41 no, #### 42", "42", 0), ("#### 42 no, #### 41", "42", 1), ("#### 42" + " " * 300, "42", 1), ("42", "42", 0),
])  # fmt: skip
def test_siirls_gsm8k_reads_the_first(response, truth, reward):
    assert resolve("verl_gsm8k_first")(response, truth) == reward


@pytest.mark.parametrize(("response", "truth", "reward"), [
    (r"\boxed{42}", "42", 1), (r"\boxed{41} or \boxed{42}", "42", 1), (r"\boxed{42} or \boxed{41}", "42", 0), ("42", "42", 0),
    (r"\boxed{\frac{1}{2}}", r"\dfrac12", 1), (r"\boxed{1/2}", r"\frac{1}{2}", 1), (r"\boxed{0.5}", r"\frac12", 1),
    (r"\boxed{.5}", r"\tfrac{1}{2}", 1), (r"\boxed{0.25}", r"\frac14", 0), (r"\boxed{02/4}", r"\frac{2}{4}", 0),
    (r"\boxed{x=5}", "5", 1), (r"\boxed{abc=5}", "5", 0), (r"\boxed{5\text{ cm}}", "5", 1), (r"\boxed{5\text{cm}}", "5", 0),
    (r"\boxed{\sqrt3}", r"\sqrt{3}", 1), (r"\boxed{90^\circ}", "90", 1), (r"\boxed{10\%}", "10", 1), (r"\boxed{ 4 2 }", "42", 1),
    (r"\boxed{\left(1, 2\right)}", "(1,2)", 1), (r"\boxed 7$ is it", "7", 1), (r"\fbox{7}", "7", 0), (r"\boxed{7", "7", 0),
    # A unit twice, or a \frac at the end, has no form: the texts are compared as they are.
    (r"\boxed{5\text{ a}\text{ b}}", r"5\text{ a}\text{ b}", 1), (r"\boxed{5\text{ a}\text{ b}}", "5", 0),
    (r"\boxed{\frac}", r"\frac", 1), (r"\boxed{1,000}", "1000", 0),
])  # fmt: skip
def test_verls_math_compares_the_last_box_in_one_form(response, truth, reward):
    assert resolve("verl_math")(response, truth) == reward


@pytest.mark.parametrize(("response", "truth", "reward", "boxed"), [
    (r"\boxed{42}", "42", -1, 1), ("Answer: 42", "42", 1, 1), ("answer :\n 42", "42", 1, 1), ("Answer: 41\nAnswer: 42", "42", 1, 1),
    ("Answer: 42\nAnswer: 41", "42", -1, -1), (r"Answer: \boxed{42}", "42", 1, 1), ("Answer: $42$", "42", 1, 1),
    ("Answer: x = 42", "42", 1, 1), ("Answer: 1,000", "1000", 1, 1), ("Answer: 42 dollars", "42", 1, 1), ("Answer: 42.0", "42", -1, -1),
    (r"Answer: \frac12", r"\frac{1}{2}", 1, 1), (r"Answer: 41 \boxed{42}", "42", -1, -1), ("42", "42", -1, -1),
    ("Answer: 42" + " \n" * 200, "42", -1, -1), (r"\boxed{42}" + " " * 100, "42", -1, -1), (r"\boxed{ 42}", "42", -1, -1),
])  # fmt: skip
def test_verls_math_dapo_wants_an_answer_line(response, truth, reward, boxed):
    assert (resolve("verl_math_dapo")(response, truth), resolve("verl_math_dapo_boxed")(response, truth)) == (reward, boxed)


@pytest.mark.parametrize(("source", "verl", "siirl"), [
    ("openai/gsm8k", "verl_gsm8k", "verl_gsm8k_first"), ("lighteval/MATH", "verl_math", "verl_math"),
    ("math_dapo", "verl_math_dapo", "verl_math_dapo"), ("math", "verl_math_dapo", "math"), ("aime_2024", "verl_math_dapo", "verl_math_dapo"),
    ("numina_cn_k12", "math", "math"), ("apps", "code_fraction", "code_fraction"), ("AIME2024", None, "verl_math"),
    ("agentica-org/DeepScaleR-Preview-Dataset", "math", "verl_math"), ("gsm8k", "gsm8k", "gsm8k"), ("mine", None, None),
])  # fmt: skip
def test_a_data_source_has_the_reward_that_the_system_chooses_for_it(source, verl, siirl):
    for system, wanted in (("verl", verl), ("siirl", siirl)):
        config = RewardConfig(chosen_as=system)
        if wanted is None:
            with pytest.raises(ValueError, match="no reward is known for data_source"):
                choose_rewards(config, source)
        else:
            chosen = choose_rewards(config, source)
            assert (chosen.weights, chosen.accuracy) == ({wanted: 1.0}, wanted)


def test_without_a_system_the_choice_is_ours():
    assert choose_rewards(RewardConfig(), "math").weights == {"math": 1.0}


@pytest.mark.parametrize(("system", "words", "chosen"), [
    ("verl", [], "verl"), ("siirl", [], "siirl"), ("verl", ["custom_reward_function.path=r.py"], None),
    ("verl", ["reward_model.enable=True", "reward_model.model.path=r"], None),
])  # fmt: skip
def test_a_run_of_verl_has_verls_rewards_and_says_which_are_others(system, words, chosen):
    translation = translate_words(system, ["data.train_files=a.parquet", "actor_rollout_ref.model.path=m", *words], HOME)
    assert translation.tree.get("reward", {}).get("chosen_as") == chosen
    assert any("PRIME's grader" in note for note in writer.notes(translation)) == bool(chosen)


@pytest.mark.parametrize(("name", "truth", "is_fit"), [
    ("verl_gsm8k", "42", True), ("verl_gsm8k", "1,000", False), ("verl_gsm8k", "forty-two", False), ("verl_math", r"\frac12", True),
    ("verl_math_dapo", " ", False), ("verl_math", "", False),
])  # fmt: skip
def test_a_ground_truth_must_be_one_that_a_response_can_state(name, truth, is_fit):
    assert (ground_truth_fault(name, truth) is None) == is_fit and name in BUILT_IN
