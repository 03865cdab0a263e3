"""Models take turns on the device: a model whose turn it is not has left, as far as its configuration says so."""

from __future__ import annotations

from pathlib import Path

from fivefold.algo import methods
from tests.support.toy import ToyModel, toy_parts


class Recorded(ToyModel):
    """A toy that writes down who is on the device whenever it computes."""

    def __init__(self, name: str, present: set[str], log: list[tuple[str, str, tuple[str, ...]]], **options) -> None:
        super().__init__(**options)
        self._name, self._present, self._log = name, present, log

    def _note(self, action: str) -> None:
        self._present.add(self._name)
        self._log.append((self._name, action, tuple(sorted(self._present))))

    def forward(self, batch):
        self._note("forward")
        return super().forward(batch)

    def train_step(self, batch, loss_fn):
        self._note("train")
        return super().train_step(batch, loss_fn)

    def weights(self):
        self._log.append((self._name, "weights", tuple(sorted(self._present))))
        return super().weights()

    def offload(self, parameters=True):
        if parameters:
            self._present.discard(self._name)
        return {}

    def prepare_offload(self):
        self._log.append((self._name, "prepare", tuple(sorted(self._present))))


def turns(mesh, run_dir: Path):
    from dataclasses import replace

    from fivefold.trainer.train import train

    present, log = set(), []
    penalty, rewards = methods.KL(coef=0.1, place="reward", estimator="k1"), methods.ProcessReward(coef=1.0)
    choices = methods.Choices(kl=penalty, process_reward=rewards)
    run = toy_parts(mesh, run_dir, "ppo", choices, ToyModel(), 2)
    models = replace(
        run.models,
        by_role={
            name: Recorded(name, present, log, value_head=name == "critic")
            for name in ("policy", "reference", "critic", "prm", "prm.reference")
        },
    )
    run.trainer.models = models
    at_rollout = []
    generate = run.engine.generate
    prepared_before = []

    def generate_noted(*arguments):
        at_rollout.append(tuple(present))
        prepared_before.append([name for name, action, _ in log if action == "prepare"])
        return generate(*arguments)

    run.engine.generate = generate_noted
    train(replace(run, models=models))
    return log, at_rollout, prepared_before


def test_only_the_model_whose_turn_it_is_is_on_the_device(cluster, tmp_path):
    ((log, at_rollout, _),) = cluster.run(turns, "megatron:d1", tmp_path)
    log = [entry for entry in log if entry[1] != "prepare"]
    assert {(name, action) for name, action, _ in log} == {
        ("policy", "forward"), ("reference", "forward"), ("critic", "forward"), ("critic", "train"), ("policy", "train"),
        ("policy", "weights"), ("prm", "forward"), ("prm", "train"), ("prm.reference", "forward"),
    }  # fmt: skip
    assert all(present == (name,) for name, action, present in log if action != "weights"), log
    assert [present for _, action, present in log if action == "weights"][1:] == [("policy",)], (
        "behind an update its parameters wait for the engine on the device"
    )
    assert at_rollout == [(), ()], "responses are sampled with none of them there"


def test_memory_for_what_leaves_later_is_prepared_once_the_first_rollout_begins(cluster, tmp_path):
    """Not earlier, where an engine may still capture graphs; of each model, with all of them away."""
    ((log, _, prepared_before),) = cluster.run(turns, "megatron:d1", tmp_path)
    first = [name for name, action, _ in log].index("policy")
    kinds = [action for _, action, _ in log[first:]]
    assert kinds.index("weights") < kinds.index("prepare") < kinds.index("forward")
    assert set(prepared_before[0]) == {"policy", "reference", "critic", "prm", "prm.reference"}
    assert all(present == () for _, action, present in log if action == "prepare")
