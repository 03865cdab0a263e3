"""What makes a run what it is: which changes are refused on resume, which are listed, which are none."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fivefold.algo.methods import CORRECTIONS
from fivefold.build import portable
from fivefold.checkpoint.fingerprint import Changes, Fingerprint
from fivefold.config import RunConfig
from fivefold.keys.identity import HARMLESS, key_of, leaves


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A run with a critic, of a model and data that are here."""
    return config_of(tmp_path, "ppo")


def config_of(tmp_path: Path, method: str) -> RunConfig:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "model/model.safetensors").write_bytes(b"weights")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1="}\n')
    (tmp_path / "reward.py").write_text("def right(response):\n    return 1.0\n")
    return RunConfig.of(
        model={"path": str(tmp_path / "model")},
        algorithm={"name": method},
        data={"train": [str(tmp_path / "train.jsonl")]},
        reward={"functions": {f"{tmp_path}/reward.py:right": 1.0}},
    )


def changes(before: RunConfig, now: RunConfig, steps: int = 10) -> Changes:
    return Fingerprint.of(now, steps, {}).compare(Fingerprint.of(before, 10, {}).values)


def with_key(part: Any, key: str, value: Any) -> Any:
    """The section with another value of one key."""
    first, _, rest = key.partition(".")
    first = next(item.name for item in dataclasses.fields(part) if key_of(item.name) == first)
    return dataclasses.replace(part, **{first: with_key(getattr(part, first), rest, value) if rest else value})


def others(value: Any) -> Iterator[Any]:
    """Another value of the same type."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, (int, float)):
        yield value + 1
    elif isinstance(value, dict):
        yield {**value, "another": 1.0}
    elif isinstance(value, list):
        yield [*value, "another"]
    else:
        yield "another"


@pytest.mark.parametrize("method", ["ppo", "prime"])
def test_a_change_of_any_key_is_refused_or_listed_by_its_field(tmp_path, method):
    """Every key of the schema, one at a time: none is left out, but those of a model that the run has not."""
    config, about_the_start = config_of(tmp_path, method), {"trainer.run_dir", "trainer.resume", "trainer.accept_changes"}
    # The method's name, its credit and the weight of a process reward decide which models there are.
    models = {"algorithm.name", "algorithm.credit", "algorithm.process_reward.coef"}
    for leaf in leaves(config):
        if leaf.key in about_the_start | models | {"trainer.steps"}:
            continue
        # The rest is looked at with the critic.
        if leaf.key.startswith("prm.") != (method == "prime"):
            continue
        if leaf.key.endswith(".megatron"):
            # A section that is left out, and no value.
            continue
        named = {"algorithm.rollout_correction.name": list(CORRECTIONS)[-1:]}
        for value in named.get(leaf.key, others(leaf.value)):
            compared = changes(config, with_key(config, leaf.key, value))
            listed, silent = (
                (compared.harmless, compared.refused) if leaf.counts is HARMLESS else (compared.refused, compared.harmless)
            )
            assert leaf.key in [text.partition(":")[0] for text in listed]
            assert silent == [] and compared.accepted == []


@pytest.mark.parametrize(
    ("key", "refused"),
    [
        ("policy.optimizer.lr", True), ("algorithm.group_size", True), ("data.prompts_per_step", True), ("trainer.seed", True),
        ("algorithm.kl.coef", True), ("engine.sampling.temperature", True), ("policy.dtype", True), ("reward.functions", True),
        ("policy.backend", False), ("trainer.save_every", False), ("policy.tokens_per_micro_batch", False),
        ("policy.offload.optimizer", False), ("launch.timeout_minutes", False), ("engine.backend", False),
    ],
)  # fmt: skip
def test_what_decides_the_curve_is_refused_and_how_it_is_computed_is_not(config, key, refused):
    counts = {leaf.key: leaf.counts for leaf in leaves(config)}
    assert (counts[key] is not HARMLESS) == refused


@pytest.mark.parametrize(("method", "credit", "now", "refused"), [
    ("ppo", None, None, ["algorithm.bootstrap_truncated: true -> false"]), ("ppo", None, True, []), ("ppo", "response", None, []),
    ("grpo", None, None, []), ("grpo", "gae", True, []),
])  # fmt: skip
def test_a_run_that_bootstrapped_before_the_key_existed_resumes_only_as_it_was(tmp_path, method, credit, now, refused):
    config = config_of(tmp_path, method)
    for key, value in (("algorithm.credit", credit), ("algorithm.bootstrap_truncated", now)):
        config = config if value is None else with_key(config, key, value)
    before = Fingerprint.of(config, 10, {}).values
    del before["algorithm.bootstrap_truncated"]
    assert Fingerprint.of(config, 10, {}).compare(before).refused == refused


def test_files_are_compared_by_what_they_hold(config, tmp_path):
    train = tmp_path / "train.jsonl"
    before = Fingerprint.of(config, 10, {}).values
    (tmp_path / "moved").mkdir()
    moved = train.rename(tmp_path / "moved/other-name.jsonl")
    elsewhere = with_key(config, "data.train", [str(moved)])
    assert Fingerprint.of(elsewhere, 10, {}).compare(before) == Changes([], [], [])
    moved.write_text('{"prompt": "1+2="}\n')
    (text,) = Fingerprint.of(elsewhere, 10, {}).compare(before).refused
    assert text.startswith(f"data.train: {train} (") and f"-> {moved} (" in text
    moved.write_text('{"prompt": "1+1="}\n')
    (tmp_path / "model/model.safetensors").write_bytes(b"Weights")
    (tmp_path / "reward.py").write_text("def right(response):\n    return 2.0\n")
    refused = Fingerprint.of(elsewhere, 10, {}).compare(before).refused
    assert [refusal.partition(":")[0] for refusal in refused] == ["model.path", "reward.functions"]


def test_a_choice_that_is_the_methods_own_is_no_change(config):
    same_choice = with_key(config, "algorithm.clip_high", config.algorithm.resolved.clip_high)
    assert changes(config, same_choice) == Changes([], [], [])


def test_more_steps_are_refused_only_where_the_learning_rate_falls_until_the_last(config):
    longer = changes(config, config, steps=20)
    assert (longer.refused, longer.harmless) == ([], ["trainer.steps: 10 -> 20"])
    falling = with_key(config, "policy.optimizer.schedule", "cosine")
    assert changes(falling, falling, steps=20).refused == ["trainer.steps: 10 -> 20"]
    fixed = with_key(falling, "policy.optimizer.decay_steps", 100)
    assert changes(fixed, fixed, steps=20).refused == []


@pytest.mark.parametrize(("warmup", "refused"), [(0.5, ["trainer.steps: 10 -> 20"]), (0.0, []), (5.0, [])])
def test_more_steps_are_refused_where_the_learning_rate_rises_over_a_share_of_them(config, warmup, refused):
    rising = with_key(config, "policy.optimizer.warmup_steps", warmup)
    assert changes(rising, rising, steps=20).refused == refused


AVERAGED = [
    ("algorithm.aggregate", "micro-batch-token-mean"), ("policy.router_balance", "config"),
    ("policy.megatron.transformer", {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}),
    ("policy.megatron.transformer", {"moe_router_load_balancing_type": ["seq_aux_loss", "aux_loss"], "moe_aux_loss_coeff": [0.1, 0.1]}),
]  # fmt: skip


@pytest.mark.parametrize("role", ["policy", "critic"])
@pytest.mark.parametrize(("key", "value"), [("tokens_per_micro_batch", 4096), ("backend", "megatron:d2")])
@pytest.mark.parametrize("averages", AVERAGED)
def test_micro_batches_stay_the_same_where_each_is_averaged_for_itself(config, averages, role, key, value):
    averaged, changed = with_key(config, *averages), f"{role}.{key}"
    assert [text.partition(":")[0] for text in changes(averaged, with_key(averaged, changed, value)).refused] == [changed]
    assert changes(config, with_key(config, changed, value)).refused == []


def test_micro_batches_may_change_where_router_losses_are_of_each_sequence(config):
    balance = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}
    balanced = with_key(config, "policy.megatron.transformer", balance)
    assert changes(balanced, with_key(balanced, "policy.tokens_per_micro_batch", 4096)).refused == []


def test_the_refusal_names_every_change_and_how_to_say_that_it_is_meant(config, tmp_path):
    now = with_key(with_key(config, "policy.optimizer.lr", 0.5), "algorithm.group_size", 4)
    compared = changes(config, now)
    with pytest.raises(ValueError, match="learns something else") as raised:
        compared.check(tmp_path)
    message = str(raised.value)
    assert "policy.optimizer.lr: 1e-06 -> 0.5" in message and "algorithm.group_size: 8 -> 4" in message
    assert "trainer.accept_changes=[policy.optimizer.lr,algorithm.group_size]" in message
    meant = changes(config, with_key(now, "trainer.accept_changes", ["policy.optimizer", "algorithm.group_size"]))
    assert meant.refused == [] and len(meant.accepted) == 2
    with pytest.raises(ValueError, match=r"must name keys or sections: got 'policy.optimizer.rl': did you mean"):
        RunConfig.of(model={"path": "m"}, trainer={"accept_changes": ["policy.optimizer.rl"]})


def test_the_refusal_offers_only_changes_that_can_be_accepted(config, tmp_path):
    adapted = with_key(config, "policy.lora.rank", 4)
    with pytest.raises(ValueError, match=r"take back policy\.lora\.rank, which") as raised:
        changes(adapted, with_key(adapted, "policy.lora.rank", 2)).check(tmp_path)
    assert "accept_changes" not in str(raised.value)
    both = with_key(with_key(adapted, "policy.lora.rank", 2), "policy.optimizer.lr", 0.5)
    with pytest.raises(
        ValueError, match=r"and resume with the other changes by trainer.accept_changes=\[policy.optimizer.lr\]"
    ):
        changes(adapted, both).check(tmp_path)


def test_different_runs_have_different_directories_when_none_is_named(config):
    name = config.run_dir.name
    assert name.startswith("ppo-model-")
    assert with_key(config, "policy.backend", "megatron:d2").run_dir.name == name
    assert with_key(config, "trainer.save_every", 5).run_dir.name == name
    assert with_key(config, "policy.optimizer.lr", 0.5).run_dir.name != name
    assert with_key(config, "data.train", ["other.jsonl"]).run_dir.name != name


def test_paths_are_written_so_that_they_mean_the_same_from_elsewhere(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative = RunConfig.of(
        model={"path": "model"},
        data={"train": ["train.jsonl"]},
        reward={"functions": {"reward.py:right": 1.0}},
        reference={"path": "Qwen/Qwen3-8B"},
    )
    written = portable(relative)
    assert written.model.path == str(tmp_path / "model") and written.data.train == [str(tmp_path / "train.jsonl")]
    assert written.reward.functions == {f"{tmp_path}/reward.py:right": 1.0}
    assert written.reference.path == "Qwen/Qwen3-8B", "what is not here stays a hub id"
    assert written.trainer.run_dir == str(tmp_path / relative.run_dir), "its name was made of the paths as they were given"
