"""What siiRL's Megatron path does not do, and what its scripts export: said key by key."""

from __future__ import annotations

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
export SIIRL_LOG_VERBOSITY=INFO
export SIIRL_LOGGING_FILENAME=/logs/siirl.log
OTHER=1
python3 -m siirl.main_dag data.train_files=/d/a.parquet actor_rollout_ref.model.path=m
"""


@pytest.mark.parametrize(("word", "says"), [
    (CHECKPOINTING + "=True", "sets a method without a granularity"),
    (ACTOR + "optim.lr_decay_style=cosine", "never steps the schedule"),
    (ACTOR + "optim.min_lr=1e-7", "never steps the schedule"),
    (ACTOR + "optim.lr_decay_steps=7", "never steps the schedule"),
])  # fmt: skip
def test_what_siirls_megatron_path_leaves_out_is_said_and_changes_nothing(word, says):
    found = translated("siirl", *MEGATRON, word)
    (outcome,) = [each for each in found.outcomes if each.key == word.partition("=")[0]]
    assert outcome.kind == "fixed" and says in outcome.reason
    assert config("siirl", *MEGATRON, word) == config("siirl", *MEGATRON)


def test_a_granularity_that_siirl_is_given_recomputes():
    start = ACTOR + "megatron.override_transformer_config.recompute_"
    words = [start + "granularity=full", start + "method=uniform", start + "num_layers=1"]
    assert config("siirl", *MEGATRON, CHECKPOINTING + "=True", *words).policy.recompute == "full"


def test_gradient_checkpointing_of_siirls_fsdp_recomputes():
    found = translated("siirl", *FSDP, CHECKPOINTING + "=False")
    assert [each.kind for each in found.outcomes if each.key == CHECKPOINTING] != ["unsupported"]
    assert config("siirl", *FSDP, CHECKPOINTING + "=True").policy.recompute == "full"
    assert RunConfig.of(found.tree).policy.recompute == "none"


def test_each_variable_of_siirls_logs_that_a_script_exports_is_answered(tmp_path):
    (tmp_path / "run.sh").write_text(SCRIPT)
    found = writer.notes(translate_words("siirl", [str(tmp_path / "run.sh")], HOME))
    assert "TENSORBOARD_DIR=/logs/tensorboard has no effect: TensorBoard's files are in trainer.run_dir/tensorboard" in found
    assert [note.partition("=")[0] for note in found if "has no effect" in note] == [
        "TENSORBOARD_DIR", "SIIRL_LOG_VERBOSITY", "SIIRL_LOGGING_FILENAME",
    ]  # fmt: skip
    assert not any("no effect" in note for note in writer.notes(translate_words("siirl", MEGATRON, HOME)))


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
