"""Translate ROLL: `python examples/start_rlvr_pipeline.py --config_path DIR --config_name FILE`, YAML with roles.

Behavior that only ROLL's code defines was read in ROLL 8eb27cc2 (2026-08-18); comments and notes cite the place.
"""

from __future__ import annotations

from typing import Any

from fivefold_dialects import shared
from fivefold_dialects.known import known
from fivefold_dialects.legacy import roll as legacy
from fivefold_dialects.roll_data import batch, columns, lengths, mixture
from fivefold_dialects.roll_method import critic, loss, low_rank, method, optimizer
from fivefold_dialects.roll_placement import FIELDS, engine, forwards, kind, layout, megatron, role
from fivefold_dialects.shared import EVERY_CHECKPOINT
from fivefold_dialects.source import Source
from fivefold_dialects.system import dialect
from fivefold_dialects.table import load, table


def run(source: Source) -> dict[str, Any]:
    resume, keep = source.text("resume_from_checkpoint") or "False", source.whole("max_ckpt_to_keep") or 0
    found: dict[str, Any] = {
        "trainer.keep": keep or EVERY_CHECKPOINT,
        "trainer.resume": "never" if resume.lower() == "false" else resume,
        "trainer.save_every": source.whole("save_steps") or 0,
        "trainer.eval_every": (source.whole("eval_steps") or 0) if source.items("validation.data_args.file_name") else 0,
        "trainer.eval_before_train": False,
    }
    epochs = role(source) + "training_args.num_train_epochs"
    by_steps = kind(source) == "rlvr" or not source.number(epochs)
    found |= {"trainer.steps": source.whole("max_steps")} if by_steps else {"trainer.epochs": source.whole(epochs)}
    if sampled := FIELDS["evaluation"](source):
        if (source.whole("validation.generating_args.top_k") or 0) > 0:
            source.lacks("validation.generating_args.top_k", "top-k in evaluation", changes_result=False)
        found |= sampled
    return found


def ahead(source: Source) -> dict[str, Any]:
    ratio = source.number("async_generation_ratio") or 0.0
    if ratio > 0 and not ratio.is_integer():
        reason = "a part of a step that is sampled ahead: rollout.max_staleness counts whole steps"
        source.lacks("async_generation_ratio", reason)
    return shared.ahead(int(ratio), "continue") if kind(source) == "rlvr" else {}


def model(source: Source) -> dict[str, Any]:
    own, reference = (source.text(f"{start}model_args.model_name_or_path") for start in (role(source), "reference."))
    found = {"model.path": own or source.path("pretrain")}
    return found | ({"reference.path": reference} if reference not in (None, found["model.path"]) else {})


def epochs(source: Source, key: str) -> int | None:
    return source.whole(key) if kind(source) == "rlvr" else None


tracked = shared.tracked(
    "track_with", "tracker_kwargs.project", "exp_name", group="tracker_kwargs.group", tags="tracker_kwargs.tags"
)


def router_replay(source: Source) -> dict[str, Any]:
    key = "actor_train.router_replay.mode"
    mode = source.text(key)
    if mode not in (None, "disabled", "R3"):
        source.lacks(key, f"the mode {mode} of router replay, which ROLL refuses too")
    return shared.replayed("R3" if mode == "R3" else None)


DERIVED = (
    *(ahead, model, low_rank, method, loss, batch, lengths, columns, mixture, layout, megatron, optimizer, critic, engine),
    *(forwards, router_replay, run, tracked),
)
_CONVERTERS = {"loggers": shared.loggers, "epochs": epochs}
TABLE = table("roll", DERIVED, _CONVERTERS, load("legacy/roll"), release_of=legacy.release_of, known=known("roll"))
translate = dialect("roll", TABLE)
