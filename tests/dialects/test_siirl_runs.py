"""What siiRL's Megatron path does not do, and what its scripts export: said key by key."""

from __future__ import annotations

import time

import pytest

from fivefold.config import RunConfig
from fivefold.config.dialect import find_system
from fivefold_dialects import writer
from tests.support.dialects import HOME, config, translate_words, translated

ACTOR = "actor_rollout_ref.actor."
MEGATRON = ["data.train_files=/d/a.parquet", "actor_rollout_ref.model.path=m", ACTOR + "strategy=megatron"]
FSDP = [*MEGATRON[:2], ACTOR + "strategy=fsdp"]
CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing"
SCRIPT = """
export TENSORBOARD_DIR=/logs/tensorboard
export SIIRL_LOG_VERBOSITY=WARNING
export SIIRL_LOGGING_FILENAME=/logs/siirl.log
OTHER=1
python3 -m siirl.main_dag data.train_files=/d/a.parquet actor_rollout_ref.model.path=m
"""


def test_gradient_checkpointing_of_siirls_megatron_recomputes_though_siirl_does_not():
    assert config("siirl", *MEGATRON, CHECKPOINTING + "=True").policy.recompute == "full"
    assert config("siirl", *MEGATRON, CHECKPOINTING + "=False").policy.recompute == "none"
    assert config("siirl", *MEGATRON).policy.recompute == "full", "siiRL's default is True"


@pytest.mark.parametrize(("word", "key", "value"), [
    (ACTOR + "optim.lr_decay_style=cosine", "schedule", "cosine"),
    (ACTOR + "optim.lr_decay_style=linear", "schedule", "linear"),
    (ACTOR + "optim.min_lr=1e-7", "min_lr", 1e-7),
    (ACTOR + "optim.lr_decay_steps=7", "decay_steps", 7),
    (ACTOR + "optim.lr_warmup_steps=5", "warmup_steps", 5),
])  # fmt: skip
def test_the_schedule_that_a_script_of_siirl_says_is_the_schedule(word, key, value):
    style = [ACTOR + "optim.lr_decay_style=cosine"] if key in ("min_lr", "decay_steps") else []
    assert getattr(config("siirl", *MEGATRON, *style, word).policy.optimizer, key) == value
    # The schema's default is linear, which siiRL never steps.
    assert config("siirl", *MEGATRON).policy.optimizer.schedule == "constant"


def test_a_granularity_that_siirl_is_given_recomputes():
    start = ACTOR + "megatron.override_transformer_config.recompute_"
    words = [start + "granularity=full", start + "method=uniform", start + "num_layers=1"]
    assert config("siirl", *MEGATRON, CHECKPOINTING + "=True", *words).policy.recompute == "full"


def test_gradient_checkpointing_of_siirls_fsdp_recomputes():
    translation = translated("siirl", *FSDP, CHECKPOINTING + "=False")
    assert [outcome.kind for outcome in translation.outcomes if outcome.key == CHECKPOINTING] != ["unsupported"]
    assert config("siirl", *FSDP, CHECKPOINTING + "=True").policy.recompute == "full"
    assert RunConfig.of(translation.tree).policy.recompute == "none"


def test_each_variable_of_siirls_logs_that_a_script_exports_acts(tmp_path):
    (tmp_path / "run.sh").write_text(SCRIPT)
    translation = translate_words("siirl", [str(tmp_path / "run.sh")], HOME)
    trainer = RunConfig.of(translation.tree).trainer
    assert (trainer.tensorboard_dir, trainer.verbosity, trainer.log_file) == (
        "/logs/tensorboard",
        "quiet",
        "/logs/siirl.log",
    )
    assert not any("no effect" in note for note in writer.notes(translation))
    shell = {**HOME, "SIIRL_LOG_VERBOSITY": "DEBUG", "SIIRL_LOGGING_FILENAME": "run_$(date +%Y)"}
    trainer = RunConfig.of(translate_words("siirl", MEGATRON, shell).tree).trainer
    assert trainer.verbosity == "debug" and trainer.log_file == time.strftime("run_%Y") and trainer.tensorboard_dir is None


def test_siirls_table_has_verls_rows_but_for_those_that_it_has_itself():
    """A section of another file, with this file's lists; what the own file says of a key comes first."""
    verl, siirl = (find_system(name).tables[0] for name in ("verl", "siirl"))
    assert set(verl.exact) <= set(siirl.exact)
    of_verl, of_siirl = (table.exact["async_training.require_batches"].form for table in (verl, siirl))
    assert (of_verl, of_siirl) == ("used", "fixed")
    sft = find_system("verl").tables[1]
    assert sft.exact["engine.full_determinism"].form == "lacks" and sft.exact["model.lora_alpha"].form == "used"
    # Rows of verl's engines, but the layout is read.
    assert sft.exact["engine.tensor_model_parallel_size"].form == "used"
