"""Scripts and YAML of others are read in bounded time and memory, nothing of them runs, and secrets stay where they are."""

from __future__ import annotations

import json
import subprocess
import sys
from types import MappingProxyType

import pytest

from fivefold.config import ConfigError
from fivefold_dialects import writer
from fivefold_dialects.table import table
from fivefold_dialects.translator import translate
from tests.dialects import hostile_scripts
from tests.support.dialects import translate_words, translated


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hostile")
    command = [sys.executable, "-m", "tests.dialects.hostile_scripts", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return directory, json.loads(done.stdout)


def test_nothing_of_a_hostile_script_is_executed(results):
    directory, became = results
    assert all(became[name][0] in ("translated", "refused") for name in hostile_scripts.EXECUTING)
    assert not list(directory.rglob("ran"))


@pytest.mark.parametrize("name", [*hostile_scripts.GREEDY, *hostile_scripts.YAML, "a pipe as YAML", "a device as a script"])
def test_a_greedy_script_ends_in_a_translation_or_a_sentence(results, name):
    became, sentences = results[1][name]
    assert became in ("translated", "refused"), sentences
    assert (became == "refused") <= bool(sentences)


def test_a_value_beyond_the_bounds_is_refused_and_not_cut(results):
    bounded = ("a doubled value", "a doubled array", "replacements that grow", "a line of 100 MB", "evals that double")
    assert all(results[1][name][0] == "refused" for name in bounded)


SECRETS = {
    "HF_TOKEN": "hf_abcdefgh",
    "WANDB_API_KEY": "0123456789",
    "db_password": "hunter22",
    "MAX_TOKENS": "64",
    "HF_TOKENS": "hf_abcdefgh,hf_abcd",
}


def _run(tmp_path, script, environment=SECRETS, given=MappingProxyType({}), **options):
    place = tmp_path / "run.sh"
    place.write_text(f"{script}\n")
    return translate_words("verl", [str(place)], {"HOME": "/home/me", **environment}, given, **options)


@pytest.mark.parametrize(
    "value",
    ["/data/$HF_TOKEN/x", "${HF_TOKEN:1:4}", "'${oc.env:HF_TOKEN}'", "${HF_TOKEN##*_}", "$db_password", "/d/$HF_TOKENS"],
)
def test_a_secret_of_the_environment_does_not_get_into_a_run_unasked(tmp_path, value):
    script = f"python3 -m verl.trainer.main_ppo data.train_files={value}"
    translation = _run(tmp_path, script)
    (sentence,) = translation.faults
    name = next(name for name in ("db_password", "HF_TOKENS", "HF_TOKEN") if name in value)
    assert f"${{{name}}}" in sentence and "--allow-secrets" in sentence and f"--env {name}=value" in sentence
    shown = writer.write(translation, "verl") + "".join(translation.refusals)
    assert "abcd" not in shown and "hunter" not in shown
    asked = _run(tmp_path, script, allow_secrets=True)
    assert not asked.refusals and set(str(asked.tree["data"]["train"])) & set("abcdhunter")
    named = _run(tmp_path, script, given=dict.fromkeys(("HF_TOKEN", "HF_TOKENS", "db_password"), "x_9999999"))
    assert not named.refusals and "999" in str(named.tree["data"]["train"])


def test_a_secret_that_no_key_of_the_run_needs_stays_a_name(tmp_path):
    script = 'if [ -z "$WANDB_API_KEY" ]; then N=1; else N=2; fi\npython3 -m verl.trainer.main_ppo data.train_files=/d '
    translation = _run(
        tmp_path, script + "trainer.nnodes=$N data.max_prompt_length=$MAX_TOKENS +ray_init.env.KEY=$WANDB_API_KEY"
    )
    assert translation.faults == []
    assert translation.tree["data"]["max_prompt_tokens"] == 64 and "0123456789" not in writer.write(translation, "verl")


def test_a_name_that_is_too_long_for_a_file_is_answered_with_a_sentence():
    with pytest.raises(ConfigError, match="no setting of verl"):
        translate_words("verl", ["x" * 5000], {})


@pytest.mark.parametrize(("keys", "most"), [(300, 301), (10_000, 1)])
def test_how_often_a_function_is_run_is_bounded_whatever_it_reads(keys, most):
    """To find out which keys change a value, it is run without each of them: here without none where they are many."""
    runs: list[int] = []

    def longest(source):
        runs.append(1)
        return {"data.max_prompt_tokens": max(source.count(key) for key in source.keys("lengths."))}

    made = table({"name": "any", "sections": {"All": {"reads": {"lengths.*!": None}}}}, [longest])
    translation = translate(made, {f"lengths.x{number}": number for number in range(keys)}, {}, {})
    assert len(runs) == most and translation.tree == {"data": {"max_prompt_tokens": keys - 1}}
    assert translation.lines[0].sources[-1] == f"lengths.x{keys - 1}"


def test_ten_thousand_unknown_options_of_a_model_are_each_refused_by_name():
    start = "trainer.trainer_config.actor_rollout_ref.actor.megatron.override_transformer_config.x"
    tree = "trainer: {trainer_strategy: megatron}\nmodel: {model_path: m, max_model_len: 99}\ncluster: {gpu_per_node: 4}"
    translation = translated("trinity", *(f"{start}{number}=1" for number in range(10_000)), tree=tree)
    assert sum("options have no x" in outcome.reason for outcome in translation.outcomes) == 10_000
