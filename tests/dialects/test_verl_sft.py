"""verl's SFT trainers: what each program and each engine takes for a key that is left out.

The numbers are those of the packages on PyPI: sft_trainer.yaml of verl 0.1 to 0.7, sft_trainer_engine.yaml and optim/*.yaml of
0.6 to 0.9.1, and the code that reads them.
"""

from __future__ import annotations

import pytest

from fivefold.config import RunConfig
from fivefold_dialects import writer
from tests.support.dialects import HOME, config, translate_words

DATA = ["data.train_files=/d/a.parquet"]
OLDER = ["-m", "verl.trainer.fsdp_sft_trainer", *DATA, "model.partial_pretrain=m"]
ENGINE = ["-m", "verl.trainer.sft_trainer", *DATA, "model.path=m"]


def run(*words, system="verl"):
    translation = translate_words(system, list(words), HOME)
    assert translation.refusals == []
    return RunConfig.of(translation.tree)


@pytest.mark.parametrize(("words", "lr", "betas", "schedule", "warmup", "lowest", "first"), [
    (OLDER, 1e-5, [0.9, 0.95], "cosine", 0.1, 0.0, 0.0),
    ([*DATA, "model.partial_pretrain=m"], 1e-5, [0.9, 0.95], "cosine", 0.1, 0.0, 0.0),
    (ENGINE, 1e-3, [0.9, 0.999], "constant", 0.0, 0.0, 0.0),
    ([*DATA, "model.path=m"], 1e-3, [0.9, 0.999], "constant", 0.0, 0.0, 0.0),
    (["-m", "verl.trainer.sft_trainer_ray", *DATA, "model.path=m", "engine=megatron"], 1e-3, [0.9, 0.999], "constant", 0.0, 0.0, 0.0),
    ([*ENGINE, "engine=veomni", "optim=veomni"], 1e-3, [0.9, 0.999], "cosine", 0.0, 0.0, 0.0),
    ([*ENGINE, "engine=torchtitan", "optim=torchtitan"], 1e-3, [0.9, 0.999], "linear", 0.0, 0.0, 0.0),
    ([*ENGINE, "engine=automodel", "optim=automodel"], 1e-5, [0.9, 0.999], "cosine", 0.0, 1e-7, 1e-6),
    ([*ENGINE, "engine=automodel"], 1e-5, [0.9, 0.999], "cosine", 0.0, 1e-7, 1e-6),
])  # fmt: skip
def test_each_sft_trainer_of_verl_has_the_defaults_of_its_own_files(words, lr, betas, schedule, warmup, lowest, first):
    run_config = run(*words)
    chosen = run_config.policy.optimizer
    assert (chosen.lr, chosen.betas, chosen.schedule, chosen.warmup_steps) == (lr, betas, schedule, warmup)
    assert (chosen.min_lr, chosen.warmup_init_lr) == pytest.approx((lowest, first)) and chosen.warmup_from == 0
    assert (run_config.trainer.epochs, chosen.weight_decay, chosen.clip_grad) == (4, 0.01, 1.0)


@pytest.mark.parametrize("key", ["optim.warmup_steps_ratio", "optim.lr_warmup_steps_ratio"])
def test_both_names_of_the_warm_up_ratio_act(key):
    translation = translate_words("verl", [*OLDER, f"{key}=0.25"], HOME)
    assert RunConfig.of(translation.tree).policy.optimizer.warmup_steps == 0.25
    assert [outcome.kind for outcome in translation.outcomes if outcome.key == key] == ["translated"]


@pytest.mark.parametrize("words", [["optim.lr_scheduler=cosine", "optim.lr=1e-5", "optim.betas=[0.9,0.95]"],
                                   ["trainer.total_epochs=4", "optim.warmup_steps_ratio=0.1"]])  # fmt: skip
def test_the_older_sft_trainer_with_a_key_at_its_default_is_the_one_without_it(words):
    assert run(*OLDER, *words) == run(*OLDER)


def test_veomni_reads_the_lengths_and_rates_of_its_own_keys():
    optimizer = run(*ENGINE, "optim=veomni", "engine=veomni", "optim.lr=1e-4", "optim.lr_min=1e-6", "optim.lr_start=1e-7",
                "optim.lr_warmup_steps=50", "optim.lr_warmup_steps_ratio=0.05").policy.optimizer  # fmt: skip
    # build_lr_scheduler of VeOmni is given the ratio only.
    assert (optimizer.min_lr, optimizer.warmup_init_lr, optimizer.warmup_steps) == (1e-6, 1e-7, 0.05)


def test_torchtitan_falls_to_a_share_of_its_rate_and_warms_up_from_1():
    run_config = run(*ENGINE, "optim=torchtitan", "engine=torchtitan", "optim.min_lr_factor=0.1", "optim.lr_warmup_steps=5")
    chosen = run_config.policy.optimizer
    assert (chosen.min_lr, chosen.warmup_steps, chosen.warmup_from) == (pytest.approx(1e-4), 5, 1)


def test_a_share_of_megatrons_warm_up_is_one_of_its_decay():
    words = ["engine=megatron", "optim=megatron", "optim.lr_decay_style=linear", "optim.lr_decay_steps=200"]
    assert run(*ENGINE, *words, "optim.lr_warmup_steps_ratio=0.1").policy.optimizer.warmup_steps == 20


def test_megatrons_betas_of_sft_are_its_own_whatever_the_key_says():
    assert run(*ENGINE, "engine=megatron", "optim.betas=[0.8,0.9]").policy.optimizer.betas == [0.9, 0.999]


@pytest.mark.parametrize("release", ["2025-02", "2025-03", "2025-04"])
def test_sft_of_an_older_release_has_that_releases_defaults(release):
    run_config = run(*OLDER, system=f"verl@{release}")
    assert (run_config.policy.optimizer.warmup_steps, run_config.trainer.epochs, run_config.policy.recompute) == (
        0.1,
        4,
        "none",
    )
    assert run(*OLDER).policy.recompute == "full"


def test_a_release_of_which_nothing_is_known_is_a_whole_sentence():
    with pytest.raises(ValueError, match="has no older defaults here: write --from verl without @2025-04"):
        translate_words("verl@2025-04", ENGINE, HOME)
    with pytest.raises(ValueError, match=r"must be one of 2026-06, .* 2025-02, 2024-11; got"):
        translate_words("verl@2024-01", OLDER, HOME)


def test_the_older_trainer_s_schedule_goes_over_its_epochs_where_the_run_ends_before():
    run = config("verl", *OLDER[2:], "trainer.total_training_steps=100")
    assert (run.trainer.steps, run.policy.optimizer.schedule_over) == (100, "data")
    assert config("verl", *OLDER[2:]).policy.optimizer.schedule_over == "run"
    assert config("verl", *ENGINE[2:], "trainer.total_training_steps=100").policy.optimizer.schedule_over == "run"


def test_the_mean_over_micro_batches_of_the_older_trainer_is_said():
    notes = writer.notes(translate_words("verl", OLDER, HOME))
    assert any(note.startswith("fsdp_sft_trainer took the mean over the tokens of each micro-batch") for note in notes)
    assert not any("micro-batch" in note for note in writer.notes(translate_words("verl", ENGINE, HOME)))
