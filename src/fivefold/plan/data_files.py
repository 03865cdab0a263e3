"""Checks of a run's data files before it starts: reads the rows as training would read them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from fivefold.algo.methods import LearnsFrom
from fivefold.config import RunConfig
from fivefold.config.mixture import counts, domains_of
from fivefold.config.schema import DataConfig
from fivefold.config.scoring import RewardConfig
from fivefold.data.data_sets import cache_of, local_file
from fivefold.data.guarded_rows import guard, special_in
from fivefold.data.light_tokenizer import LightTokenizer
from fivefold.data.rows import (
    TEMPLATE_NAMES,
    TOOLS_NEED_TEMPLATE,
    Columns,
    Row,
    bounds_of,
    check_kept,
    check_responses,
    count_rows,
    key_for,
    parse_row,
    read_rows,
    source_of,
    text_of,
    with_system_prompt,
)
from fivefold.errors import UserError, shown
from fivefold.keys.findings import Findings
from fivefold.keys.ranges import suggest
from fivefold.plan.tokenizer_files import check_learned_ends
from fivefold.reward.choose import ChosenRewards, check_columns, choose_rewards, report_code, user_functions
from fivefold.reward.rules import describe_forms, forms_read, ground_truth_fault, takes_truth
from fivefold.tables import DATA_SETS

_PROMPTS = 100
"""Number of prompts of each built-in reward that are looked at."""
ROWS = 1000
"""Number of rows checked in each file; smaller files are checked completely."""


@dataclass
class _Seen:
    """Findings from the rows of some files."""

    rows: int = 0
    """Number of rows that would become prompts; all rows that were not checked are counted."""
    is_complete: bool = True
    """True if every row was checked."""
    sources: Counter[str] = field(default_factory=Counter)
    """data_source -> number of checked rows that would become prompts."""
    responses: int = 0
    """Number of rows that have something to learn from."""
    truths: int = 0
    """Number of checked rows with a ground truth."""
    columns: tuple[str, ...] = ()
    """Columns of the first row."""
    prompts: Counter[str] = field(default_factory=Counter)
    """Built-in reward -> number of its prompts that were looked at."""
    unasked: dict[str, list[str]] = field(default_factory=dict)
    """Built-in reward -> places of the prompts among them that do not ask for the form that it reads."""
    learned_ends: dict[bool, int | None] = field(default_factory=dict)
    """Whether rows are conversations -> the token that ends what is learned of the first such row."""
    special: list[str] = field(default_factory=list)
    """Places of special tokens in the texts of rows, with the tokens."""


def check_data(findings: Findings, config: RunConfig, tokenizer: LightTokenizer | None, vocab: int | None) -> None:
    """Report files and rows that training or evaluation could not use; without a tokenizer, texts are not encoded."""
    data, before = config.data, len(findings.errors)
    if not data.train:
        findings.error("data.train", "names no file")
    files: dict[str, Path] = {}
    for key in DATA_SETS:
        for name in getattr(data, key):
            try:
                files[name] = local_file(name, key, cache_of(data))
            except UserError as error:
                findings.error(f"data.{key}", f": {error}")
    if len(findings.errors) > before:
        return
    if data.chat_template is not None and tokenizer is not None:
        try:
            tokenizer = tokenizer.with_template(data.chat_template, "data.chat_template")
        except UserError as error:
            findings.error("data.chat_template", f": {error}")
            return
    if data.special_tokens != "keep" and not data.apply_chat_template:
        findings.ignore("data.special_tokens", "data.apply_chat_template is false: special tokens are read as such")
    if data.chat_template_kwargs and not data.apply_chat_template:
        findings.ignore("data.chat_template_kwargs", "data.apply_chat_template is false")
    elif data.chat_template_kwargs and tokenizer is not None and tokenizer.template is None:
        findings.error("data.chat_template_kwargs", "are variables of a chat template, which the tokenizer has not")
    if ours := [name for name in data.chat_template_kwargs if name in TEMPLATE_NAMES]:
        findings.error("data.chat_template_kwargs", f"cannot name what the prompt itself says: got {', '.join(ours)}")
        return
    reader = _Reader(config, tokenizer, vocab, files)
    try:
        training = reader.read(data.train, learns=config.algorithm.offline, scored=not config.algorithm.offline)
        _check_count(findings, config, training)
        _check_domains(findings, data, training)
        if not data.mixture:
            _report_rest(findings, data, "data.train", training, config.prompts_taken)
        if not config.algorithm.offline:
            _report_forms(findings, training)
            _report_truths(findings, config, training)
        elif tokenizer is not None and (ends := {end for end in training.learned_ends.values() if end is not None}):
            check_learned_ends(findings, config, tokenizer, ends)
        if training.special:
            findings.note(_describe_special(training.special, data.special_tokens))
        scored = [] if config.algorithm.offline else [training]
        if data.val:
            scored.append(_check_validation(findings, config, reader))
        if scored and all(seen.is_complete for seen in scored):
            sources = {source for seen in scored for source in seen.sources}
            for key, reason in unused_sources(data, config.reward, sources).items():
                findings.ignore(key, reason)
            names = {name for rewards in reader.chosen.values() for name in rewards.weights}
            report_code(findings.at("reward"), config.reward, names)
        if data.expert:
            plain = _Reader(replace(config, data=replace(data, system_prompt=None)), tokenizer, vocab, files)
            experts = plain.read(data.expert, learns=True, scored=False, kind="responses")
            message = f"must not be larger than the expert's responses: got {data.expert_per_step} for {experts.rows}"
            findings.require(experts.rows >= data.expert_per_step, "data.expert_per_step", message)
            _report_rest(findings, data, "data.expert", experts, data.expert_per_step)
    except UserError as error:
        findings.error("data", f": {error}")


def unused_sources(data: DataConfig, reward: RewardConfig, sources: Collection[str]) -> dict[str, str]:
    """Return keys for a data_source that no row of the data has -> why they change nothing."""
    named: dict[str, Collection[str]] = {
        "reward.by_source": reward.by_source,
        "data.ground_truth_by_source": data.ground_truth_by_source,
    }
    known = ", ".join(sorted(sources))
    return {
        f"{key}.{source}": f"no row has this data_source{suggest(source, sources)}; the data has {known}"
        for key, by_source in named.items()
        for source in by_source
        if source not in sources
    }


def _describe_special(places: Sequence[str], mode: str) -> str:
    """Describe the training rows that contain special tokens, and how they are handled."""
    effect = "open turns there; data.special_tokens: escape makes text of them" if mode == "keep" else "are escaped there"
    rows = f"{len(places)} row{'s' if len(places) > 1 else ''}"
    return f"data.train: {rows} hold{'' if len(places) > 1 else 's'} special tokens, which {effect} (the first: {places[0]})"


def _report_forms(findings: Findings, training: _Seen) -> None:
    """Report built-in rewards whose prompts mostly do not ask for the form that they read."""
    for name, places in training.unasked.items():
        if 2 * len(places) > (looked := training.prompts[name]):
            forms = describe_forms(forms_read(name))
            findings.note(
                f"data.train: {len(places)} of the first {looked} prompts do not ask for {forms}, where the reward {name} "
                f"reads the answer (the first: {places[0]}): a model that does not write it by itself gets no reward; ask "
                "for it in data.system_prompt or in the prompts"
            )


def _report_truths(findings: Findings, config: RunConfig, training: _Seen) -> None:
    """Report user functions that take a ground truth which no row has."""
    takers = [name for name in user_functions(config.reward) if takes_truth(name, training.columns)]
    if takers and not training.truths:
        other = key_for(training.columns, "ground_truth_key") or "data.ground_truth_key"
        findings.note(f"data.train: {', '.join(takers)} takes ground_truth, which is empty in every row: set {other}")


def _check_count(findings: Findings, config: RunConfig, training: _Seen) -> None:
    per_step, rows = config.prompts_taken, training.rows
    if not rows:
        findings.error("data.train", f"has no prompt of at most data.max_prompt_tokens = {config.data.max_prompt_tokens}")
    elif rows < per_step:
        findings.error(
            "data.prompts_per_step" if per_step == config.data.prompts_per_step else "algorithm.prompts_per_round",
            f"must not be larger than the training set: got {per_step} for {rows} prompts",
        )
    elif "critic" in config.roles and config.trainer.steps is None and training.is_complete:
        steps = config.trainer.epochs * (rows // per_step)
        message = f"must be below the {steps} steps of the run, or the policy never learns: got {config.critic.warmup_steps}"
        findings.require(config.critic.warmup_steps < steps, "critic.warmup_steps", message)


def _report_rest(findings: Findings, data: DataConfig, key: str, seen: _Seen, per_step: int) -> None:
    """Report the last prompts that no step takes, because every epoch has whole steps and the same order."""
    rest = seen.rows % per_step
    if data.shuffle or seen.rows < per_step or (seen.is_complete and not rest):
        return
    never = f"the last {rest} of {seen.rows}" if seen.is_complete else f"up to {per_step - 1} of the last"
    findings.note(
        f"{key}: {never} prompts are never taken: with data.shuffle: false every epoch has the same order, and whole steps "
        f"of {per_step}"
    )


def _check_domains(findings: Findings, data: DataConfig, training: _Seen) -> None:
    """Check that the mixture has rows for each domain, if all rows were checked."""
    if not data.mixture or not training.is_complete:
        return
    domain_of, counted = domains_of(data.domains), Counter[str]()
    for source, rows in training.sources.items():
        counted[domain_of(source)] += rows
    for name, count in counts(data.mixture, data.prompts_per_step).items():
        message = (
            f": a step takes {count} prompts of {name!r}, of which there are {counted[name]}; there are {dict(counted)}"
        )
        findings.require(counted[name] >= count, "data.mixture", message)
    if others := [f"{name} ({rows})" for name, rows in counted.items() if name not in data.mixture]:
        findings.note(f"data.mixture leaves out the rows of {', '.join(others)}")


def _check_validation(findings: Findings, config: RunConfig, reader: _Reader) -> _Seen:
    """Check the validation rows.

    With a method that learns from data, they may lack responses or rewards, but not both.
    """
    must_score, files = config.eval.generate if config.algorithm.offline else True, config.data.val
    validation = reader.read(files, learns=False, scored=bool(must_score), first=config.eval.max_prompts)
    known = config.may_generate and all(reader.knows_reward(source) for source in validation.sources)
    if must_score is None and known:
        reader.read(files, learns=False, scored=True, first=config.eval.max_prompts)
    if not validation.rows:
        findings.error("data.val", f"has no prompt of at most data.max_prompt_tokens = {config.data.max_prompt_tokens}")
    if config.algorithm.offline and not validation.responses and must_score is not True:
        findings.require(
            known and must_score is not False,
            "data.val",
            ": there is nothing to evaluate, the rows have no responses to learn from and nothing is sampled; leave it out, "
            "or name rewards and set eval.generate: true",
        )
    return validation


@dataclass
class _Reader:
    """Reads rows as training would; a ValueError names file, row and column."""

    config: RunConfig
    tokenizer: LightTokenizer | None
    vocab: int | None
    files: Mapping[str, Path]
    """Name of a data set -> its local file."""
    bound: set[tuple[str, frozenset[str]]] = field(default_factory=set)
    """Reward functions and columns that fill their parameters."""
    chosen: dict[str, ChosenRewards] = field(default_factory=dict)
    """data_source -> its rewards. Choosing them parses the user's files."""

    def read(
        self, files: Sequence[str], *, learns: bool, scored: bool, first: int | None = None, kind: LearnsFrom | None = None
    ) -> _Seen:
        """Read and check rows of files.

        `learns`: rows must have what the method learns from. `scored`: their responses will be scored. `kind`: what is
        learned from, if it differs from the method's own.
        """
        data, seen = self.config.data, _Seen()
        columns, kind = Columns.of(data), kind or self.config.algorithm.method.learns_from
        for name in files:
            path = Path(f"{self.files[name]}{bounds_of(name)}")
            source = None
            for place, row in self._rows(path, seen, first):
                where, source = f"{name}, row {place}", source or source_of(path)
                try:
                    parsed = self._guard(parse_row(row, columns, kind, source), seen, where)
                    parsed = with_system_prompt(parsed, data.system_prompt)
                    if learns:
                        check_responses(parsed, columns, kind, list(map(str, row)))
                    fits = self._encode(parsed)
                    if learns and self.tokenizer is not None and parsed.is_conversation not in seen.learned_ends:
                        seen.learned_ends[parsed.is_conversation] = self._learned_end(parsed, self.tokenizer)
                    if scored:
                        self._check_reward(parsed, row)
                        self._look_at_prompt(parsed, seen, where)
                except ValueError as error:
                    raise UserError(f"{where}: {error}") from error
                seen.rows += fits
                seen.sources[parsed.source] += fits
                seen.responses += bool(parsed.responses) or parsed.is_conversation
                seen.truths += bool(parsed.ground_truth.strip())
                seen.columns = seen.columns or tuple(map(str, row))
        return seen

    def _guard(self, row: Row, seen: _Seen, where: str) -> Row:
        """Return the row after applying `data.special_tokens`; `seen` counts rows that contain special tokens."""
        data = self.config.data
        if self.tokenizer is None or not data.apply_chat_template:
            return row
        pattern = self.tokenizer.special_pattern
        if (token := special_in(row, pattern)) is not None:
            seen.special.append(f"{token} in {where}")
        return guard(row, data.special_tokens, pattern)

    def _rows(self, path: Path, seen: _Seen, first: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
        limit = ROWS if first is None else min(first, ROWS)
        count = 0
        for count, row in enumerate(islice(read_rows(path), limit), 1):
            yield count - 1, row
        if not count:
            raise UserError(f"{path} has no rows")
        if count == ROWS:
            wanted = self.config.prompts_taken + ROWS if first is None else first
            further = count_rows(path, wanted) - ROWS
            seen.rows += further
            seen.is_complete = seen.is_complete and not further

    def _encode(self, row: Row) -> bool:
        """Return whether the prompt is short enough; raise ValueError for a text that the model cannot read."""
        data, tokenizer = self.config.data, self.tokenizer
        if tokenizer is None:
            return True
        kwargs = data.chat_template_kwargs | row.template_kwargs
        if row.tools and not (data.apply_chat_template and tokenizer.template is not None):
            raise UserError(TOOLS_NEED_TEMPLATE)
        if row.is_conversation and data.learned_turns == "last":
            prompt, texts = row.messages[:-1], [tokenizer.render(row.messages, False, kwargs)]
        elif row.is_conversation:
            prompt = row.messages[: next(i for i, message in enumerate(row.messages) if message["role"] == "assistant")]
            texts = [tokenizer.render(row.messages, False, kwargs)]
        else:
            prompt, texts = row.messages, list(row.responses)
        if data.apply_chat_template:
            template = partial(tokenizer.render, kwargs=kwargs)
            text = template(prompt)
            check_kept(prompt, text, template)
        else:
            text = text_of(row)
        tokens = tokenizer.check_text(text)
        if not tokens:
            raise UserError(f"the prompt has no tokens: {shown(text)}")
        for piece in texts:
            tokenizer.check_text(piece)
        if self.vocab is not None and (outside := [token for token in tokens if token >= self.vocab]):
            raise UserError(f"token {outside[0]} of the prompt is not in the model's vocabulary of {self.vocab}")
        most = min(data.max_prompt_tokens, (data.max_total_tokens or sys.maxsize) - 1)
        if len(tokens) > most and data.overlong_prompts == "refuse":
            bound = "max_prompt_tokens" if most == data.max_prompt_tokens else "max_total_tokens"
            raise UserError(
                f"the prompt has {len(tokens)} tokens, data.{bound} is {getattr(data, bound)}; raise it, or set "
                "data.overlong_prompts to drop"
            )
        return len(tokens) <= most

    def _learned_end(self, row: Row, tokenizer: LightTokenizer) -> int | None:
        """Return the token that ends what is learned of a row."""
        if not row.is_conversation:
            return tokenizer.eos_token_id
        last = max(place for place, message in enumerate(row.messages) if message["role"] == "assistant")
        return tokenizer.turn_end(row.messages[: last + 1], self.config.data.chat_template_kwargs | row.template_kwargs)

    def knows_reward(self, source: str) -> bool:
        """Return whether a reward can be chosen for a data_source."""
        try:
            self._rewards(source)
        except UserError:
            return False
        return True

    def _rewards(self, source: str) -> ChosenRewards:
        if source not in self.chosen:
            self.chosen[source] = choose_rewards(self.config.reward, source)
        return self.chosen[source]

    def _check_reward(self, row: Row, columns: Mapping[str, Any]) -> None:
        """Raise ValueError if the rewards of the row's source cannot score it."""
        names = frozenset(columns)
        for name in self._rewards(row.source).weights:
            if (name, names) not in self.bound:
                check_columns(self.config.reward, name, list(columns))
                self.bound.add((name, names))
            if fault := ground_truth_fault(name, row.ground_truth, self.config.reward.code.trusted_tests):
                data = self.config.data
                column, _, part = data.ground_truth_by_source.get(row.source, data.ground_truth_key).partition(".")
                other = None if row.ground_truth else key_for(names - {column}, "ground_truth_key")
                hint = f"; set {other}" if other else ""
                raise UserError(
                    f"column {column!r}, {part or 'the ground truth'} {fault}: got {shown(row.ground_truth)}{hint}"
                )

    def _look_at_prompt(self, row: Row, seen: _Seen, where: str) -> None:
        """Count the prompts that do not name the form in which a reward reads the answer, for the first rows of each."""
        text = "\n".join(str(message["content"]) for message in row.messages)
        for name in self._rewards(row.source).weights:
            forms = forms_read(name)
            if forms and seen.prompts[name] < _PROMPTS:
                seen.prompts[name] += 1
                if not any(form in text for form in forms):
                    seen.unasked.setdefault(name, []).append(where)
