"""A step's metrics -> sentences on what is wrong with what a run learns, with the key to change. No torch here.

`RULES` is the whole table. A rule reads only numbers that the step's row already has, so that no warning slows a step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fivefold.config.schema import WarningsConfig
from fivefold.reward.rules import describe_forms

WARNINGS = "warnings.jsonl"
"""File of a run with one row for each warning of each step: step, rule, text."""
_SMALLEST_DIFF = 0.01
"""Differences of log-probs, in nats, below which an engine's growing difference is rounding."""
_MOST_ROWS = 1000
"""First rows of metrics.jsonl in which a resumed run looks for the first values of metrics."""
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Facts:
    """Values of a run's configuration that sentences name."""

    max_response_tokens: int = 0
    group_size: int = 1
    compares_groups: bool = True
    """Whether advantages compare the samples of a group, so that equal rewards in it give no gradient."""
    forms: Callable[[str], Sequence[str]] = lambda source: ()
    """data_source -> texts, one of which a response must have to be right; empty if its reward reads any text."""
    sources: Sequence[str] = ()
    """`data_source` of the training prompts."""
    offline: bool = False
    """Whether the run learns from responses in the data, so that no key of rewards changes what it learns."""
    has_turns: bool = False
    """Whether trajectories have several turns, so that they may end at several limits."""

    @property
    def limit(self) -> str:
        """Return where responses are cut off."""
        if self.has_turns:
            return "a limit of turns or tokens, as trajectory/end_* shows"
        return f"data.max_response_tokens = {self.max_response_tokens}"

    @property
    def limit_keys(self) -> str:
        """Return the keys of that limit."""
        of_turns = "environment.max_turns, data.max_response_tokens or data.max_total_tokens"
        return of_turns if self.has_turns else "data.max_response_tokens"


@dataclass(frozen=True)
class Look:
    """What a rule sees of a step."""

    row: Row
    first: Row
    """First values of the metrics in `_FIRST`."""
    facts: Facts

    def of_sources(self, metric: str) -> dict[str, float]:
        """Return data_source -> value of `val/<source>/<metric>`."""
        end = f"/{metric}"
        names = [name for name in self.row if name.startswith("val/") and name.endswith(end) and len(name) > 4 + len(end)]
        return {name[4 : -len(end)]: self.row[name] for name in names}


@dataclass(frozen=True)
class Rule:
    """One warning; its name is the key in `trainer.warnings` of its threshold."""

    name: str
    measure: Callable[[Look], float | None]
    """Returns the number that reaches the threshold when something is wrong; None if the row does not have it."""
    sentence: Callable[[Look, float], str]
    """Returns the values and the key to change; its second argument is the threshold."""


@dataclass
class Warnings:
    """Applies the rules to each row of a run, and remembers which sentences were printed when."""

    config: WarningsConfig = field(default_factory=WarningsConfig)
    facts: Facts = field(default_factory=Facts)
    _first: dict[str, float] = field(default_factory=dict)
    _evaluated: dict[str, Any] = field(default_factory=dict)
    _printed: dict[str, int] = field(default_factory=dict)

    def resume(self, metrics: Path) -> None:
        """Read the first values of metrics from the rows of an interrupted run."""
        if metrics.is_file():
            with metrics.open("rb") as file:
                for line in file.readlines(_MOST_ROWS * 4000)[:_MOST_ROWS]:
                    self._remember(_object(line))

    def of(self, step: int, row: Row) -> tuple[list[dict[str, Any]], list[str]]:
        """Return (rows for `WARNINGS`, sentences to print now) for the row of a step."""
        self._remember(row)
        if not self.config.enabled:
            return [], []
        # What an evaluation shows holds until the next one.
        self._evaluated = {name: row[name] for name in row if name.startswith("val/")} or self._evaluated
        look = Look({**self._evaluated, **row}, self._first, self.facts)
        sentences = holding(look, self.config)
        rows: list[dict[str, Any]] = [{"step": step, "rule": name, "text": text} for name, text in sentences.items()]
        printed = []
        for name, text in sentences.items():
            last = self._printed.get(name)
            if last is None or step >= last + self.config.every:
                self._printed[name] = step
                printed.append(text)
        return rows, printed

    def _remember(self, row: Row) -> None:
        for name in _FIRST:
            if name not in self._first and isinstance(value := row.get(name), float):
                self._first[name] = value


def holding(look: Look, config: WarningsConfig) -> dict[str, str]:
    """Return name -> sentence of every rule whose threshold is reached. A rule that another sentence includes is left
    out."""
    sentences: dict[str, str] = {}
    for rule in RULES:
        threshold, measured = getattr(config, rule.name), rule.measure(look)
        # NaN and null reach no threshold.
        if threshold is not None and measured is not None and measured >= threshold:
            sentences[rule.name] = rule.sentence(look, threshold)
    if sentences.keys() & {"equal_rewards", "evaluation"}:
        sentences.pop("truncated", None)
    return sentences


def _object(line: bytes) -> Row:
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def _equal_rewards(look: Look) -> float | None:
    groups = look.row.get("reward/frac_reward_zero_std")
    if groups is not None and look.facts.compares_groups:
        return float(groups)
    low, high = look.row.get("reward/min"), look.row.get("reward/max")
    return None if low is None or high is None else float(low == high)


def _about_equal_rewards(look: Look, threshold: float) -> str:
    row, facts = look.row, look.facts
    share = _equal_rewards(look) or 0.0
    if not facts.compares_groups or "reward/frac_reward_zero_std" not in row:
        which = f"all samples of the step had the same reward, {row['reward/mean']:.3g}"
    elif share == 1:
        which = f"all {facts.group_size} samples of every group had the same reward"
    else:
        which = f"in {share:.0%} of the groups all {facts.group_size} samples had the same reward"
    gradient = ""
    if row.get("policy/grad_norm") == 0:
        gradient = ": no gradient"
    elif share == 1 and facts.compares_groups:
        # The KL penalty and an entropy bonus have gradients of their own.
        gradient = ": no gradient from rewards"
    cut, formed = row.get("response/truncated_fraction", 0.0), row.get("response/form_fraction")
    forms = tuple(dict.fromkeys(form for source in facts.sources for form in facts.forms(source)))
    return f"{which}{gradient}; {_responses(cut, formed, forms, facts)}; {_remedy(cut, formed, forms, facts, row)}"


def _accuracies(look: Look) -> dict[str, float]:
    """Return the accuracy of each source for which 0 means something: rewards may be parts of 1 that never reach it."""
    accuracies = look.of_sources("accuracy")
    return {
        name: value
        for name, value in accuracies.items()
        if look.facts.forms(name) or look.row.get(f"val/{name}/reward") == 0
    }


def _evaluation(look: Look) -> float | None:
    accuracies = _accuracies(look)
    return 1 - min(accuracies.values()) if accuracies else None


def _about_evaluation(look: Look, threshold: float) -> str:
    """Return a sentence on the source with the smallest accuracy."""
    accuracy = _accuracies(look)
    source = min(accuracy, key=accuracy.__getitem__)
    cut, formed = look.row.get(f"val/{source}/truncated_fraction", 0.0), look.row.get(f"val/{source}/form_fraction")
    forms = tuple(look.facts.forms(source))
    none = "no" if accuracy[source] == 0 else f"{accuracy[source]:.0%} of the"
    result = f"{none} greedy responses to {source} were correct"
    remedy = _remedy(cut, formed, forms, look.facts, {}, look.facts.offline)
    return f"{result}; {_responses(cut, formed, forms, look.facts)}; {remedy}"


def _responses(cut: float, formed: float | None, forms: Sequence[str], facts: Facts) -> str:
    """Return how many responses were cut off, and how many had what the reward reads."""
    lengths = f"{cut:.0%} of responses were cut off at {facts.limit}"
    if formed is None or not forms:
        return lengths
    return f"{lengths}; {'none' if formed == 0 else f'{formed:.0%}'} contained {describe_forms(forms)}"


def _remedy(cut: float, formed: float | None, forms: Sequence[str], facts: Facts, row: Row, offline: bool = False) -> str:
    """Return the key that removes the most probable reason."""
    if cut >= 0.5:
        return f"raise {facts.limit_keys}"
    if formed is not None and formed < 0.5 and forms:
        return f"ask for {describe_forms(forms)} in data.system_prompt"
    if offline:
        return "look at samples.jsonl: more steps or a higher policy.optimizer.lr may be needed"
    if row.get("reward/solve_all") == 1:
        return "the prompts are too easy: use harder ones in data.train"
    return "look at samples.jsonl: use easier prompts in data.train, a larger algorithm.group_size or other reward.functions"


def _truncated(look: Look) -> float | None:
    fractions = [value for value in look.of_sources("truncated_fraction").values() if value is not None]
    fraction = look.row.get("response/truncated_fraction")
    return max([*fractions, *([] if fraction is None or "reward/mean" not in look.row else [fraction])], default=None)


def _about_truncated(look: Look, threshold: float) -> str:
    fraction = look.row.get("response/truncated_fraction") or 0.0
    shares = {"responses": fraction} if fraction >= threshold and "reward/mean" in look.row else {}
    for source, share in look.of_sources("truncated_fraction").items():
        if share is not None and share >= threshold:
            shares[f"greedy responses to {source}"] = share
    subjects = " and ".join(f"{share:.0%} of {name}" for name, share in shares.items())
    return f"{subjects} were cut off at {look.facts.limit}: raise {look.facts.limit_keys if look.facts.has_turns else 'it'}"


def _entropy_drop(look: Look) -> float | None:
    now, first = look.row.get("policy/entropy"), look.first.get("policy/entropy")
    return None if now is None or not first or first <= 0 else 1 - now / first


def _about_entropy(look: Look, threshold: float) -> str:
    now, first = look.row["policy/entropy"], look.first["policy/entropy"]
    return (
        f"the entropy fell to {now:.3g} nats, {now / first:.0%} of the first step's {first:.3g}: responses to a prompt"
        " become alike; raise algorithm.clip_high or algorithm.entropy_coef, or lower policy.optimizer.lr"
    )


def _about_clipping(look: Look, threshold: float) -> str:
    return (
        f"{look.row['policy/clip_fraction']:.0%} of tokens have a clipped ratio: updates move the policy too far within a "
        "step; lower policy.optimizer.lr, algorithm.updates_per_step or algorithm.ppo_epochs"
    )


def _about_kl(look: Look, threshold: float) -> str:
    return (
        f"the KL divergence from the reference is {look.row['policy/kl_reference']:.3g} nats a token: the policy leaves its "
        "reference; raise algorithm.kl.coef or lower policy.optimizer.lr"
    )


def _engine_diff(look: Look) -> float | None:
    now, first = (row.get("rollout/logprob_diff_mean") for row in (look.row, look.first))
    return None if now is None or first is None or now < _SMALLEST_DIFF else now / max(first, 1e-9)


def _about_engine(look: Look, threshold: float) -> str:
    now, first = look.row["rollout/logprob_diff_mean"], look.first["rollout/logprob_diff_mean"]
    return (
        f"the engine's log-probs differ from the trainer's by {now:.3g} on average, the first step's by {first:.3g}: "
        "samples come from another policy than the one that learns; set algorithm.rollout_correction, or lower "
        "rollout.max_staleness"
    )


def _metric(name: str) -> Callable[[Look], float | None]:
    return lambda look: look.row.get(name)


RULES: tuple[Rule, ...] = (
    Rule("equal_rewards", _equal_rewards, _about_equal_rewards),
    Rule("evaluation", _evaluation, _about_evaluation),
    Rule("truncated", _truncated, _about_truncated),
    Rule("entropy_drop", _entropy_drop, _about_entropy),
    Rule("clip_fraction", _metric("policy/clip_fraction"), _about_clipping),
    Rule("kl", _metric("policy/kl_reference"), _about_kl),
    Rule("engine_diff", _engine_diff, _about_engine),
)
_FIRST = ("policy/entropy", "rollout/logprob_diff_mean")
"""Metrics that rules compare with their first value."""
