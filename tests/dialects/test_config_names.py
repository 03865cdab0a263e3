"""`--config-name`: the YAML that another system's program would start from is read, or the command is refused."""

from __future__ import annotations

import pytest

from fivefold.config import ConfigError, RunConfig
from fivefold_dialects import writer
from tests.support.dialects import HOME, translate_words

SCRIPT = """
PROJECT_DIR="$(pwd)"
CONFIG_PATH="$PROJECT_DIR/examples/multiturn/config"
python3 -m verl.trainer.main_ppo --config-path="$CONFIG_PATH" --config-name='gsm8k_multiturn_grpo' \\
    algorithm.adv_estimator=grpo data.train_files=a.parquet actor_rollout_ref.model.path=m actor_rollout_ref.rollout.n=4
"""
YAML = """
hydra: {searchpath: ["file://verl/trainer/config"]}
defaults: [ppo_trainer, _self_]
data: {train_batch_size: 64}
actor_rollout_ref: {actor: {ppo_mini_batch_size: 64}, rollout: {name: sglang, ignore_eos: %s}}
"""
WORDS = ["data.train_files=a.parquet", "actor_rollout_ref.model.path=m"]


@pytest.fixture
def repository(tmp_path):
    """A repository with the script and its YAML where verl's own has them; gives the script."""
    directory = tmp_path / "repository" / "examples" / "multiturn"
    (directory / "config").mkdir(parents=True)
    (directory / "config" / "gsm8k_multiturn_grpo.yaml").write_text(YAML % "True")
    (directory / "run.sh").write_text(SCRIPT)
    (tmp_path / "elsewhere").mkdir()
    return directory / "run.sh"


@pytest.mark.parametrize("place", ["repository", "elsewhere"])
def test_a_script_finds_its_yaml_from_any_directory(repository, tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path / place)
    translation = translate_words("verl", [str(repository)], HOME)
    assert [outcome.key for outcome in translation.outcomes if outcome.is_refused] == [
        "actor_rollout_ref.rollout.ignore_eos"
    ]
    assert translation.tree["data"]["prompts_per_step"] == 64


def test_which_yaml_was_read_is_said(repository, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "elsewhere")
    file = repository.parent / "config" / "gsm8k_multiturn_grpo.yaml"
    file.write_text(YAML % "False")
    translation = translate_words("verl", [str(repository)], HOME)
    assert writer.notes(translation)[0] == f"--config-name is the file {file}"
    assert RunConfig.of(translation.tree).data.prompts_per_step == 64
    assert f"# Note: --config-name is the file {file}." in writer.write(translation, "verl")


@pytest.mark.parametrize(
    "words", [["--config-name=mine"], ["--config-path", "conf", "--config-name", "mine"], ["-cn", "mine"]]
)
@pytest.mark.parametrize("system", ["verl", "siirl", "roll", "skyrl"])
def test_a_config_name_that_is_neither_known_nor_found_is_refused(system, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--config-name must name an existing YAML file: got mine"):
        translate_words(system, [*words, *WORDS], HOME)


@pytest.mark.parametrize("name", ["ppo_megatron_trainer", "ppo_megatron_trainer.yaml"])
def test_a_name_that_verl_brings_needs_no_file(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Hydra reads verl's own without a directory, whatever lies here.
    (tmp_path / "ppo_megatron_trainer.yaml").write_text("data: {train_batch_size: 7}")
    translation = translate_words(
        "verl", [f"--config-name={name}", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", *WORDS], HOME
    )
    assert (translation.tree["policy"]["backend"], translation.tree["data"]["prompts_per_step"]) == ("megatron:d4t2p1", 1024)


def test_files_that_a_yaml_starts_from_are_read_below_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(
        "data: {train_batch_size: 48, max_prompt_length: 7}\nactor_rollout_ref: {actor: {ppo_mini_batch_size: 16}}"
    )
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, base, _self_]\ndata: {train_batch_size: 32}")
    tree = translate_words("verl", ["--config-path=.", "--config-name=mine", *WORDS], HOME).tree
    assert (tree["data"]["prompts_per_step"], tree["data"]["max_prompt_tokens"], tree["algorithm"]["updates_per_step"]) == (
        32,
        7,
        2,
    )
    (tmp_path / "base.yaml").unlink()
    with pytest.raises(ConfigError, match="defaults must name YAML files next to it"):
        translate_words("verl", ["--config-path=.", "--config-name=mine", *WORDS], HOME)
