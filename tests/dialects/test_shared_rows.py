"""Rules that stand for many rows: verl's table below a key of Trinity's, and sections that set nothing."""

from __future__ import annotations

import pytest

from fivefold_dialects.trinity import TABLE as TRINITY
from fivefold_dialects.verl import TABLE as VERL
from tests.dialects.test_dialects import GRPO_VERL
from tests.dialects.test_trinity_trainer import FSDP
from tests.support.dialects import translated

START = "trainer.trainer_config."


def outcome(translation, key):
    (match,) = [entry for entry in translation.outcomes if entry.key == key]
    return match


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("actor_rollout_ref.actor.load_weight", "unsupported"),
        ("actor_rollout_ref.ref.fsdp_config.offload_policy", "unsupported"),
        ("critic.checkpoint.save_contents", "fixed"),
    ],
)
def test_a_key_of_verl_means_below_trinitys_trainer_what_verls_table_says(key, kind):
    row, verl_row = TRINITY.row(START + key), VERL.row(key)
    assert (row.form, row.note, row.off, row.changes_result) == (
        verl_row.form,
        verl_row.note,
        verl_row.off,
        verl_row.changes_result,
    )
    assert outcome(translated("trinity", f"{START}{key}=x", tree=FSDP), START + key).kind == kind


def test_trinitys_own_row_comes_before_verls():
    assert VERL.row("actor_rollout_ref.actor.policy_loss.loss_mode").form == "used"
    assert "Trinity uses its own losses" in TRINITY.row(START + "actor_rollout_ref.actor.policy_loss.loss_mode").note
    assert TRINITY.row(START + "reward_model.strategy").note.startswith("verl's own data")


def test_an_empty_section_sets_nothing_and_a_value_in_its_place_is_refused():
    key = "actor_rollout_ref.ref.megatron.override_transformer_config"
    for value in ("{}", "null", "${actor_rollout_ref.actor.megatron.override_transformer_config}"):
        assert outcome(translated("verl", *GRPO_VERL, f"{key}={value}"), key).kind == "fixed"
    assert outcome(translated("verl", *GRPO_VERL, f"{key}=dropout"), key).kind == "unknown"
