"""What a run is, key by key, with the content of the files that it names: written with a checkpoint, compared on resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from fivefold.checkpoint.manifest import sum_of_ends
from fivefold.config import RunConfig
from fivefold.config.identity import FUNCTION, Counts, leaves
from fivefold.config.learners import PolicyConfig
from fivefold.config.roles import LEARNERS
from fivefold.config.schema import ModelConfig
from fivefold.hub import commit_of
from fivefold.models.torch_dist import find_torch_dist, is_torch_dist

_OF_THIS_START = ("trainer.run_dir", "trainer.resume", "trainer.accept_changes")
"""Keys about how a run is started, not about the run."""
_NEVER_ACCEPTED = tuple(f"{name}.lora.rank" for name in LEARNERS)
"""Keys that say of what size a checkpoint's tensors are."""
_BEFORE_THE_KEY = {"algorithm.bootstrap_truncated": ("algorithm.credit", "gae", True)}
"""Key -> (another key, a value of that, what a run with this value did before the key existed), where that is no default."""
_OF_A_MODEL = ("*.safetensors", "*.distcp", ".metadata", "*.json", "*.jinja", "*.txt", "*.model")


@dataclass(frozen=True)
class Changes:
    """Keys that differ between a checkpoint and the run that is to resume from it, each as `key: old -> new`."""

    refused: list[str]
    """What is learned changes with them."""
    accepted: list[str]
    """The same, and `trainer.accept_changes` names them."""
    harmless: list[str]

    def check(self, checkpoint: Path) -> None:
        """Raise ValueError where the run cannot resume from the checkpoint."""
        if not self.refused:
            return
        keys = ",".join(change.partition(":")[0] for change in self.refused)
        listed = "".join(f"\n  {change}" for change in self.refused)
        raise ValueError(
            f"trainer.resume: {checkpoint} is of a run that learns something else:{listed}\n"
            f"resume with the changes by trainer.accept_changes=[{keys}], choose another trainer.run_dir, or start over by "
            "trainer.resume=never, which moves what is there aside"
        )


@dataclass(frozen=True)
class Fingerprint:
    """What a run is, as it is compared with what a checkpoint's run was."""

    values: dict[str, Any] = field(default_factory=dict)
    """Key -> its value, as JSON has it; of a key that names files, their names and a hash of what each holds."""
    harmless: frozenset[str] = frozenset()
    """Keys that may change."""
    accept: Sequence[str] = ()
    """Keys and sections whose change is meant."""
    commits: dict[str, str] = field(default_factory=dict)
    """Hub id -> the commit that the run reads."""

    @classmethod
    def of(cls, config: RunConfig, steps: int | None, directories: Mapping[str, Path]) -> Fingerprint:
        """That of a run of so many steps, if their number is known; `directories` has where each hub id lies on this
        machine, if it does."""
        values: dict[str, Any] = {}
        for key, value, counts in _keys(config):
            if counts is Counts.CONTENT and value:
                names = value if isinstance(value, list) else [value]
                held = content_of([directories.get(name, Path(name)) for name in names])
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
        """What differs from the values that a checkpoint has."""
        usual = _as_json({key: value for key, value, _ in _keys(RunConfig(ModelConfig("")))})
        changes = Changes([], [], [])
        for key, now in self.values.items():
            # A key that the version of the checkpoint did not have was as it is when left out, with few exceptions.
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


def _keys(config: RunConfig) -> Iterator[tuple[str, Any, Counts]]:
    """(key, value, how it counts) of the keys that say what a run is and how it runs."""
    chosen = {leaf.key: leaf.value for leaf in leaves(config.algorithm.resolved, "algorithm")}
    learning = [cast(PolicyConfig, role.section).optimizer for role in config.roles.learners.values()]
    falling = {each.schedule_over for each in learning if each.schedule != "constant" and each.decay_steps is None}
    for leaf in leaves(config):
        counts = leaf.counts
        if leaf.key in _OF_THIS_START:
            continue
        if _LENGTHS.get(leaf.key) in falling:
            # The learning rate falls until the last step, or the end of the data.
            counts = Counts.VALUE
        if (section := leaf.key.partition(".")[0]) in LEARNERS and section not in config.roles:
            counts = Counts.HARMLESS
        yield leaf.key, chosen.get(leaf.key, leaf.value), counts


def content_of(paths: Sequence[Path]) -> list[str | None]:
    """A hash of what stands in each file, or in a model's directory; None for what is not here."""
    found: list[str | None] = []
    for path in paths:
        if path.is_dir() and is_torch_dist(path):
            path = find_torch_dist(path) or path
        files = sorted({file for pattern in _OF_A_MODEL for file in path.glob(pattern)}) if path.is_dir() else [path]
        if not all(file.is_file() for file in files):
            found.append(None)
            continue
        parts = [(file.name if path.is_dir() else "", file.stat().st_size, sum_of_ends(file)) for file in files]
        found.append(hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12])
    return found


def _with_code(value: Any) -> Any:
    """The value with `file.py:function@content` in the place of each function of the user's."""
    if isinstance(value, dict):
        return {_with_code(key): _with_code(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_code(item) for item in value]
    found = FUNCTION.fullmatch(value) if isinstance(value, str) else None
    if found is None or not Path(found[1]).is_file():
        return value
    return f"{Path(found[1]).name}:{found[2]}@{sum_of_ends(Path(found[1])):08x}"


def _as_json(values: dict[str, Any]) -> dict[str, Any]:
    """The values as they come back from a file: the keys of a mapping are texts then."""
    return json.loads(json.dumps(values))  # type: ignore[no-any-return]


def _is_files(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"files", "content"}


def _is_same(then: Any, now: Any) -> bool:
    """Of files what they hold counts, of those that are not here their names."""
    if not (_is_files(then) and _is_files(now)):
        return bool(then == now)
    both = None not in (*then["content"], *now["content"])
    return bool(then["content"] == now["content"] if both else then["files"] == now["files"])


def _shown(value: Any) -> str:
    if _is_files(value):
        return ", ".join(f"{name} ({held or 'not here'})" for name, held in zip(*value.values(), strict=True))
    return json.dumps(value, ensure_ascii=False)
