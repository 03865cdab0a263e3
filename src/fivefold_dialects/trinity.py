"""Translate Trinity-RFT (`trinity run --config FILE`): an explorer that samples and verl's trainer, on separate GPUs.

tables/trinity.yaml has a row for each key. Values that depend on several keys are in trinity_method.py (the algorithm,
batches and steps), trinity_data.py (tasks and rewards), trinity_models.py (GPUs, the engine and the models) and here (the
run); names and numbers of releases before 2026 are in legacy/. Behavior that only Trinity's code defines was read in
Trinity-RFT 221b0759 and 9051d637; comments and notes cite the place.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

from fivefold.config.dialect import Translation, Tree
from fivefold.errors import UserError
from fivefold_dialects import trinity_data as of_data
from fivefold_dialects import trinity_method as of_method
from fivefold_dialects import trinity_models as of_models
from fivefold_dialects.known import known
from fivefold_dialects.legacy import trinity as legacy
from fivefold_dialects.source import EVERY_CHECKPOINT, Source, flatten, merged
from fivefold_dialects.system import System
from fivefold_dialects.table import load, table, when
from fivefold_dialects.trinity_keys import EVALUATED, HALVES, VERL, is_megatron, period, periods, samples


def _is_set(value: Any) -> bool:
    return value not in ("", None)


def _differ(one: Any, other: Any) -> bool:
    """Return whether two values differ; an empty value never does, and a slash at the end of a path is ignored."""
    ends = [str(value).rstrip("/") for value in (one, other)]
    return _is_set(one) and _is_set(other) and one != other and ends[0] != ends[1]


def join(trees: list[Tree]) -> Tree:
    """Return one tree for two files, one that explores and one that trains: the run with `mode: both` on the GPUs of both.
    With sync_style=fixed the explorer waits for new weights after each sync_interval steps (explorer.py,
    _pull_latest_weights) and the trainer waits for samples, so they run in lockstep. The section `explorer` comes from one
    file, `trainer` and `cluster` (the trainer's GPUs) from the other; other sections must agree."""
    modes = {str(tree.get("mode")): tree for tree in trees}
    if len(trees) != 2 or set(modes) != {"explore", "train"}:
        return merged(trees)
    explorer, trainer = modes["explore"], modes["train"]
    of_one_file = ("mode", "explorer", "cluster", "trainer", "monitor", "log", "service", "ignore_validator_suggestions")
    shared_parts = [copy.deepcopy(tree) for tree in (explorer, trainer)]
    for part, name in itertools.product(shared_parts, of_one_file):
        part.pop(name, None)
    explored, trained = (dict(flatten(part)) for part in shared_parts)
    if differing := sorted(key for key in explored.keys() & trained.keys() if _differ(explored[key], trained[key])):
        both = f"{differing[0]}={explored[differing[0]]} and {trained[differing[0]]}"
        raise UserError(f"the files of explorer and trainer must have the same {', '.join(differing)}: got {both}")
    of_trainer = {key: trainer[key] for key in of_one_file if key in trainer}
    for key in (key for key in explored.keys() & trained.keys() if not _is_set(trained[key])):
        legacy.remove(shared_parts[1], key)
    return {**merged(shared_parts), **of_trainer, "explorer": explorer.get("explorer", {}), "mode": HALVES}


def program(source: Source) -> dict[str, Any]:
    mode = source.text("mode") or "both"
    if mode not in ("both", HALVES, "train") or (mode == "train" and samples(source)):
        reason = "half of a run of two programs: pass the other program's file too" if mode in ("explore", "train") else mode
        source.lacks("mode", f"{reason}; a run samples and trains here (both), or learns from data (train with dpo or sft)")
    if mode == HALVES and source.text(legacy.RELEASE) in legacy.FIRST:
        source.lacks("mode", "an explorer that never waits for the trainer's weights (explorer.py of 2025-05, explore)")
    return {}


def run(source: Source) -> dict[str, Any]:
    place = "/".join(filter(None, map(source.text, ("checkpoint_root_dir", "project", "name"))))
    place = source.text("model.checkpoint_path") or place
    keep = source.whole("trainer.max_checkpoints_to_keep") or source.whole(VERL + "trainer.max_actor_ckpt_to_keep")
    key = "buffer.total_steps" if source.whole("buffer.total_steps") else "trainer.total_steps"
    steps = source.whole(key)
    if steps and steps % period(source):
        source.lacks(key, f"a run that ends between two syncs: set a multiple of sync_interval = {period(source)}")
    evaluated = bool(source.items(EVALUATED)) and samples(source)
    return {
        "trainer.run_dir": place,
        "trainer.keep": keep if keep and keep > 0 else EVERY_CHECKPOINT,
        "trainer.save_every": periods(source, source.whole("trainer.save_interval")),
        "trainer.eval_every": periods(source, source.whole("explorer.eval_interval")) if evaluated else 0,
        "trainer.eval_before_train": source.flag("explorer.eval_on_startup") and evaluated,
        "trainer.steps": periods(source, steps) or None,
        "trainer.epochs": source.whole("buffer.total_epochs"),
        **(of_data.sampled_evaluation(source) if evaluated else {"eval.samples": 0}),
        "trainer.loggers": list(dict.fromkeys(["console", *source.loggers("monitor.monitor_type")])),
    }


DERIVED = (
    *(program, of_models.low_rank, *when(samples, of_method.ahead, of_method.replayed), of_models.layout, of_models.memory),
    *(of_data.lengths, of_method.batch, of_method.epochs, of_method.algorithm, of_method.loss, of_method.kl),
    *(of_models.optimizer, *when(of_method.uses_critic, of_models.critic), *when(is_megatron, of_models.weights)),
    *(*when(samples, of_models.engine), of_data.data, run, of_data.FIELDS["tracking"]),
)
_KNOWN, _OLDER = known("trinity").with_below(VERL.rstrip("."), known("verl")), load("legacy/trinity")
TABLE = table("trinity", DERIVED, older=_OLDER, elsewhere={legacy.RELEASE: None}, known=_KNOWN)


class _Trinity(System):
    """System of Trinity-RFT, whose configurations may have keys with older names."""

    def __call__(
        self, tree: Tree, overrides: list[str], /, environment: Mapping[str, str] | None = None, version: str = ""
    ) -> Translation:
        """Return the translation of settings, read as those of release `version` or of the release that their keys show."""
        version, tree = version or legacy.release_of(tree), legacy.with_second_file(tree)
        today, names = legacy.moved(tree)
        return legacy.named(super().__call__(today, overrides, environment, version), names)


translate = _Trinity("trinity", (TABLE,), join=join)
