"""data_source -> its rewards, and the reward that decides whether a response is correct."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cache
from urllib.parse import urlsplit

from fivefold.config.scoring import CodeConfig, JudgeConfig, RewardConfig
from fivefold.errors import UserError
from fivefold.keys.findings import Findings
from fivefold.layout import ParallelLayout
from fivefold.reward.code.confine import layers, missing
from fivefold.reward.forms import OFFERED_BY_JUDGE, TOKENS, check_binding, columns_of
from fivefold.reward.rules import (
    BUILT_IN,
    SOURCES_OF,
    check_name,
    check_parameters,
    forms_read,
    is_judged,
    reward_of,
    runs_programs,
    takes_ground_truth,
)
from fivefold.user_code import is_user_code, parameters_of


@dataclass(frozen=True)
class ChosenRewards:
    """Rewards of one data_source."""

    weights: dict[str, float]
    """Reward name -> weight; empty if a reward model is the only reward."""
    accuracy: str | None
    """Reward that decides whether a response is correct, if there is one."""


def choose_rewards(config: RewardConfig, source: str) -> ChosenRewards:
    """Return the rewards of a data_source: its own, else the common ones, else the built-in one that fits.

    With a reward model, no built-in reward is chosen automatically: the model may be the only reward.
    """
    weights = config.by_source.get(source) or config.functions
    if not weights and config.model.path is None:
        name = reward_of(source, config.chosen_as)
        if name is None:
            raise UserError(
                f"no reward is known for data_source {source!r}: name one in reward.functions or reward.by_source; "
                f"chosen by themselves: {', '.join(SOURCES_OF[config.chosen_as])}"
            )
        weights = {name: 1.0}
    for name in weights:
        check_name(name)
    _check_accuracy(config)
    return ChosenRewards(weights, config.accuracy if config.accuracy in weights else default_accuracy(weights))


def forms_by_source(config: RewardConfig) -> Callable[[str], tuple[str, ...]]:
    """Return a function: data_source -> texts, of which a response needs one to be correct by its reward."""

    @cache
    def forms(source: str) -> tuple[str, ...]:
        try:
            return forms_read(choose_rewards(config, source).accuracy or "")
        except UserError:
            # Nothing scores this source.
            return ()

    return forms


def default_accuracy(names: Iterable[str]) -> str | None:
    """Return the first reward by name that takes a ground truth, or the first of all; the order in YAML does not matter."""
    ordered = sorted(names)
    return next((name for name in ordered if takes_ground_truth(name)), ordered[0] if ordered else None)


def _choosable(config: RewardConfig) -> set[str]:
    """Return the names of all rewards that some data_source may have."""
    named = {*config.functions, *(name for weights in config.by_source.values() for name in weights)}
    chosen = () if config.functions or config.model.path is not None else SOURCES_OF[config.chosen_as].values()
    return named.union(chosen)


def report_code(findings: Findings, config: RewardConfig, names: Iterable[str]) -> None:
    """Report limits for programs if none of the rewards `names` runs any."""
    if config.code != CodeConfig() and not any(map(runs_programs, names)):
        findings.ignore("code", "no reward runs programs")


def _check_accuracy(config: RewardConfig) -> None:
    """Raise ValueError if `accuracy` is not a function that some data_source uses."""
    named = _choosable(config)
    if config.accuracy is not None and config.accuracy not in named:
        used = ", ".join(sorted(named)) or "of which there is none"
        raise UserError(
            f"reward.accuracy must be one of the reward functions in use, {used}: "
            f"got {config.accuracy!r}; add it to reward.functions, with weight 0 if it is to count for the accuracy only"
        )


def _check_judge(findings: Findings, judge: JudgeConfig, is_rewarding: bool) -> None:
    """Check the judge's settings; `is_rewarding`: the reward `judge` is used, otherwise only functions send it requests."""
    message = "must name the judge's servers, as http://host:8000/v1, or judge.backend those that the run is to start"
    findings.require(bool(judge.url) or judge.backend is not None, "url", message)
    findings.require(not judge.url or judge.backend is None, "url", "and judge.backend are two places: keep one")
    if judge.backend is not None:
        layout = ParallelLayout.parse(judge.backend)
        kinds = ("vllm",) if is_rewarding else ("vllm", "sglang")
        usable = layout.backend in kinds and layout.pp == layout.ep == 1
        findings.require(usable, "backend", f"must be a layout of {' or '.join(kinds)} with d and t: got {judge.backend}")
    for url in judge.url:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.username and not parts.query
        findings.require(usable, "url", f"must be an address as http://host:8000/v1: got {url.partition('?')[0]!r}")
    findings.require(bool(judge.model), "model", "must name the judge's model, as its servers know it")
    message = f"must hold {{response}}, what is to be judged: got {judge.prompt[:100]!r}"
    findings.require("{response}" in judge.prompt, "prompt", message)
    try:
        groups = re.compile(judge.pattern).groups
    except re.error as error:
        findings.error("pattern", f"must be a regular expression: {error}")
    else:
        findings.require(groups == 1, "pattern", f"must have one group, the number: got {groups} in {judge.pattern!r}")
    usual, unread = JudgeConfig(), dict[str, str]()
    if judge.backend is None:
        unread |= dict.fromkeys(("memory_fraction", "max_model_len"), "the servers of url were started with what they have")
    if not is_rewarding:
        asking = ("prompt", "verdict", "pattern", "scale", "temperature", "max_tokens", "request", "retries", "concurrency")
        unread |= dict.fromkeys(asking, "functions ask by themselves")
    elif judge.verdict != "score":
        unread |= dict.fromkeys(("pattern", "scale"), f"the verdict is {judge.verdict}")
    for key, reason in unread.items():
        if getattr(judge, key) != getattr(usual, key):
            findings.ignore(key, reason)
    name = judge.api_key_variable
    findings.require(name is None or name in os.environ, "api_key_variable", f"names a variable that is set: got {name!r}")


def check_columns(config: RewardConfig, name: str, columns: Collection[str]) -> None:
    """Raise ValueError for a user's function with a required parameter that rows of these columns cannot fill."""
    if name not in BUILT_IN and (parameters := parameters_of(name)) is not None:
        check_binding(name, parameters, columns, OFFERED_BY_JUDGE if config.judge.functions_ask else ())


def user_functions(config: RewardConfig) -> list[str]:
    """Return the names of the user's reward functions."""
    return sorted(
        {name for weights in (config.functions, *config.by_source.values()) for name in weights if is_user_code(name)}
    )


def reads_tokens(config: RewardConfig) -> bool:
    """Return whether a user's function takes the tokens of responses, or may take them: it is known only when loaded."""
    parameters_of_functions = map(parameters_of, user_functions(config))
    return any(parameters is None or TOKENS in parameters.named for parameters in parameters_of_functions)


def columns_read(config: RewardConfig) -> tuple[str, ...] | None:
    """Return the columns of the data that user functions take by name; None if one of them may take any."""
    names: set[str] = set()
    for name in user_functions(config):
        if (columns := columns_of(parameters_of(name))) is None:
            return None
        names |= {*columns}
    return tuple(sorted(names))


def check_rewards(findings: Findings, config: RewardConfig) -> None:
    """Report functions that cannot be found.

    A data_source that chooses its own reward is checked when the data are read.
    """
    sections = {"functions": config.functions} | {
        f"by_source.{source}": rewards for source, rewards in config.by_source.items()
    }
    for key, weights in sections.items():
        for name in weights:
            try:
                check_name(name)
                check_parameters(name)
            except UserError as error:
                findings.error(key, f": {error}")
    if any(runs_programs(name) for weights in sections.values() for name in weights):
        reason = missing()
        findings.require(reason is None, "functions", f": `code` runs unknown programs, and only locked up: {reason}")
        if reason is None:
            findings.note(f"programs are locked up by {layers()}")
        fits = config.code.memory_mb <= config.memory_mb
        findings.require(fits, "code.memory_mb", f"must be at most reward.memory_mb = {config.memory_mb}")
    names = [name for weights in sections.values() for name in weights]
    is_rewarding, asks = any(map(is_judged, names)), config.judge.functions_ask
    findings.require(
        not asks or any(is_user_code(name) for name in names),
        "judge.functions_ask",
        "needs a function of yours in reward.functions or reward.by_source",
    )
    if is_rewarding or asks:
        _check_judge(findings.at("judge"), config.judge, is_rewarding)
    elif config.judge != JudgeConfig():
        findings.ignore("judge", "no reward is named judge")
    report_code(findings, config, _choosable(config))
    if config.chosen_as != RewardConfig.chosen_as and (config.functions or config.model.path is not None):
        other = "reward.functions has rewards" if config.functions else "reward.model.path is a reward"
        findings.ignore("chosen_as", f"{other} for every data_source")
    for name in config.environment:
        findings.require(name in os.environ, "environment", f"names variables that are set here: got {name!r}")
    try:
        _check_accuracy(config)
    except UserError as error:
        findings.errors.append(str(error))
