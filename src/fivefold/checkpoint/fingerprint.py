"""Identity of a run, key by key, with the content of its files: written with a checkpoint and compared on resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from fivefold.algo.aggregate import LEGACY_AGGREGATE
from fivefold.checkpoint.manifest import sum_of_ends
from fivefold.config import RunConfig
from fivefold.config.learners import PolicyConfig
from fivefold.config.roles import LEARNERS
from fivefold.config.schema import ModelConfig
from fivefold.data.rows import bounds_of, part_of
from fivefold.errors import UserError
from fivefold.hub import commit_of
from fivefold.keys.identity import FUNCTION, Counts, leaves
from fivefold.models.torch_dist import find_torch_dist, is_torch_dist

_OF_THIS_START = ("trainer.run_dir", "trainer.resume", "trainer.accept_changes")
"""Keys about how a run is started, which are not part of its identity."""
_NEVER_ACCEPTED = tuple(f"{name}.lora.rank" for name in LEARNERS)
"""Keys that determine the size of a checkpoint's tensors."""
_BEFORE_THE_KEY = {"algorithm.bootstrap_truncated": ("algorithm.credit", "gae", True)}
"""Key -> (another key, its value, behavior of runs with that value before the key existed), if that is not the default."""
_OF_A_DIRECTORY = ("*.arrow", "*.safetensors", "*.distcp", ".metadata", "*.json", "*.jinja", "*.txt", "*.model")


@dataclass(frozen=True)
class Changes:
    """Keys that differ between a checkpoint and the run that is to resume from it, each as `key: old -> new`."""

    refused: list[str]
    """Changes that affect what is learned."""
    accepted: list[str]
    """Changes that affect what is learned, but are listed in `trainer.accept_changes`."""
    harmless: list[str]

    @property
    def accepted_keys(self) -> list[str]:
        return list(map(_key, self.accepted))

    def check(self, checkpoint: Path) -> None:
        """Raise ValueError if the run cannot resume from the checkpoint."""
        if not self.refused:
            return
        keys = [_key(change) for change in self.refused]
        fixed, others = (",".join(key for key in keys if (key in _NEVER_ACCEPTED) == never) for never in (True, False))
        remedies = [f"take back {fixed}, which determines the sizes of the checkpoint's tensors"] if fixed else []
        if others:
            remedies.append(f"resume with {'the other' if fixed else 'the'} changes by trainer.accept_changes=[{others}]")
        listed = "".join(f"\n  {change}" for change in self.refused)
        raise UserError(
            f"trainer.resume: {checkpoint} is from a run that learns something else:{listed}\n"
            f"{' and '.join(remedies)}, choose another trainer.run_dir, or start over by "
            "trainer.resume=never, which moves what is there aside"
        )


@dataclass(frozen=True)
class Fingerprint:
    """Identity of a run, for comparison with that of a checkpoint's run."""

    values: dict[str, Any] = field(default_factory=dict)
    """Key -> its value as JSON; for a key that names files, their names and a hash of the content of each."""
    harmless: frozenset[str] = frozenset()
    """Keys that may change freely."""
    accept: Sequence[str] = ()
    """Keys and sections whose change the user accepts."""
    commits: dict[str, str] = field(default_factory=dict)
    """Hub id -> commit that the run reads."""

    @classmethod
    def of(cls, config: RunConfig, steps: int | None, directories: Mapping[str, Path]) -> Fingerprint:
        """Build the fingerprint of a run of `steps` steps (None: not known).

        `directories` maps each hub id to its directory on this machine, if it has one.
        """
        values: dict[str, Any] = {}
        for key, value, counts in _keys(config):
            if counts is Counts.CONTENT and value:
                names = value if isinstance(value, list) else [value]
                held = content_of([directories.get(name, part_of(Path(name))[0]) for name in names])
                # The rows of a part of a file are its content and the bounds.
                held = [content and content + bounds_of(name) for content, name in zip(held, names, strict=True)]
                values[key] = {"files": names, "content": held}
            else:
                values[key] = _with_code(value)
        if steps is None:
            del values["trainer.steps"]
        else:
            values["trainer.steps"] = steps
        harmless = frozenset(key for key, _, counts in _keys(config) if counts is Counts.HARMLESS)
        commits = {name: commit_of(path) for name, path in directories.items() if str(path) != name}
        return cls(_as_json(values), harmless, config.trainer.accept_changes, commits)

    def compare(self, before: dict[str, Any]) -> Changes:
        """Return the differences to the values of a checkpoint."""
        usual = _as_json({key: value for key, value, _ in _keys(RunConfig(ModelConfig("")))})
        changes = Changes([], [], [])
        for key, now in self.values.items():
            # A key that is newer than the checkpoint had its default value then, with few exceptions.
            other, value, meant = _BEFORE_THE_KEY.get(key, ("", None, None))
            then = before.get(key, meant if other and before.get(other) == value else usual.get(key))
            if _is_same(then, now):
                continue
            text = f"{key}: {_shown(then)} -> {_shown(now)}"
            if key in self.harmless:
                changes.harmless.append(text)
            elif key not in _NEVER_ACCEPTED and any(key == name or key.startswith(f"{name}.") for name in self.accept):
                changes.accepted.append(text)
            else:
                changes.refused.append(text)
        return changes


_LENGTHS = {"trainer.steps": "run", "trainer.epochs": "data"}
"""Key -> the value of `optimizer.schedule_over` whose schedules it gives the length of."""
_MICRO_BATCHES = ("tokens_per_micro_batch", "backend")
"""Keys of a model's section that divide a step into micro-batches."""


def _by_micro_batch(config: RunConfig) -> set[str]:
    """Return the keys that divide a step into micro-batches whose losses are averaged one by one."""
    learners, policy = config.roles.learners, config.policy
    names = {
        name
        for name, role in learners.items()
        if policy.router_balance != "none" or (role.section.megatron or policy.megatron).options.balances_by_micro_batch
    }
    if config.algorithm.resolved.aggregate == LEGACY_AGGREGATE:
        names |= learners.keys() & {"policy", "critic"}
    # Models without keys of their own have the policy's.
    return {f"{name}.{key}" for name in names | {"policy"} for key in _MICRO_BATCHES} if names else set()


def _keys(config: RunConfig) -> Iterator[tuple[str, Any, Counts]]:
    """Yield (key, value, how a change counts) for the keys that define a run and how it runs."""
    chosen = {leaf.key: leaf.value for leaf in leaves(config.algorithm.resolved, "algorithm")}
    learning = [cast(PolicyConfig, role.section).optimizer for role in config.roles.learners.values()]
    by_length = {optimizer.schedule_over for optimizer in learning if optimizer.depends_on_length}
    by_micro_batch = _by_micro_batch(config)
    for leaf in leaves(config):
        counts = leaf.counts
        if leaf.key in _OF_THIS_START:
            continue
        if _LENGTHS.get(leaf.key) in by_length:
            # The learning rate decays until the last step or the end of the data, or rises during a share of them.
            counts = Counts.VALUE
        if leaf.key in by_micro_batch:
            counts = Counts.VALUE
        if (section := leaf.key.partition(".")[0]) in LEARNERS and section not in config.roles:
            counts = Counts.HARMLESS
        yield leaf.key, chosen.get(leaf.key, leaf.value), counts


def _key(change: str) -> str:
    return change.partition(":")[0]


def content_of(paths: Sequence[Path]) -> list[str | None]:
    """Return a hash of the content of each file or model directory; None for those that are not on this machine."""
    hashes: list[str | None] = []
    for path in paths:
        if path.is_dir() and is_torch_dist(path):
            path = find_torch_dist(path) or path
        files = sorted({file for pattern in _OF_A_DIRECTORY for file in path.glob(pattern)}) if path.is_dir() else [path]
        if not all(file.is_file() for file in files):
            hashes.append(None)
            continue
        parts = [(file.name if path.is_dir() else "", file.stat().st_size, sum_of_ends(file)) for file in files]
        hashes.append(hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12])
    return hashes


def _with_code(value: Any) -> Any:
    """Return the value with each user function replaced by `file.py:function@content`."""
    if isinstance(value, dict):
        return {_with_code(key): _with_code(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_code(item) for item in value]
    match = FUNCTION.fullmatch(value) if isinstance(value, str) else None
    if match is None or not Path(match[1]).is_file():
        return value
    return f"{Path(match[1]).name}:{match[2]}@{sum_of_ends(Path(match[1])):08x}"


def _as_json(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values as JSON restores them: keys of mappings become texts."""
    return json.loads(json.dumps(values))  # type: ignore[no-any-return]


def _is_files(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"files", "content"}


def _is_same(then: Any, now: Any) -> bool:
    """Compare values. Files are compared by content, or by name if any of them is not on this machine."""
    if not (_is_files(then) and _is_files(now)):
        return bool(then == now)
    both = None not in (*then["content"], *now["content"])
    return bool(then["content"] == now["content"] if both else then["files"] == now["files"])


def _shown(value: Any) -> str:
    if _is_files(value):
        return ", ".join(f"{name} ({held or 'not here'})" for name, held in zip(*value.values(), strict=True))
    return json.dumps(value, ensure_ascii=False)
