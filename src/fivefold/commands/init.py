"""`fivefold init`: five questions, or flags, -> a commented run.yaml that `fivefold check` accepts."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from fivefold.algo.methods import METHODS, LearnsFrom
from fivefold.commands.flags import BY_SOURCE, ENGINES
from fivefold.commands.proposals import (
    DATA,
    HUB_MODEL,
    Rows,
    look_at,
    propose_data,
    propose_engine,
    propose_model,
    validation_of,
)
from fivefold.commands.run_yaml import MOST_PROMPT, MOST_RESPONSE, Answers, write
from fivefold.config import RunConfig
from fivefold.config.loader import build, read_mapping
from fivefold.config.machine import visible_gpus
from fivefold.config.schema import DataConfig
from fivefold.data.data_sets import FORMS, HubDataSet, cache_of, local_file
from fivefold.data.rows import Columns
from fivefold.errors import UserError
from fivefold.keys.ranges import OneOf
from fivefold.models.families import load_spec
from fivefold.models.spec import ModelSpec
from fivefold.plan.check import check
from fivefold.plan.tokenizer_files import is_hub_id
from fivefold.reward.rules import check_name, needs_truth

_METHODS = {"rollouts": "grpo", "responses": "sft", "pairs": "dpo"}
_UNKNOWN_ROWS = 1024
_MOST_SHARDS = 8


def init(options: argparse.Namespace) -> int:
    """Ask the questions, write and check the file; return the exit code."""
    out: Path = options.out
    if out.exists() and not options.force:
        raise UserError(f"{out} is there already: name another file, or overwrite it with --force")
    text = write(_answers(options))
    config = build(RunConfig, read_mapping(text, str(out)))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text)
    print(f"{out}: {config.algorithm.name} of {config.model.path} on {config.policy.backend}")
    findings = check(config)
    for error in findings.errors:
        print(f"error    {error}")
    for sentence in findings.duration:
        print(f"note     {sentence}")
    if config.data.train == [DATA] and not Path(DATA).exists():
        print(f"next     fivefold data gsm8k --out {Path(DATA).parent}")
    if findings.trial and not findings.errors:
        print(f"next     {shlex.join(['fivefold', 'train', str(out), *findings.trial])}")
    print(f"next     {shlex.join(['fivefold', 'check' if findings.errors else 'train', str(out)])}")
    return 0


def _answers(options: argparse.Namespace) -> Answers:
    def ask(question: str, flag: str | None, proposed: str, fault: Callable[[str], str | None]) -> str:
        return _ask(question, flag, proposed, fault, options.yes)

    if options.method and (wrong := OneOf(METHODS).fault(options.method)):
        raise UserError(f"--method {wrong}")
    model = ask("Model: a directory, or an id of the Hugging Face hub", options.model, propose_model(), _model_fault)
    spec = load_spec(model) if Path(model).is_dir() else None
    train = ask(f"Data: {FORMS}", options.data, propose_data(), _data_fault)
    uses = _look_at(train, options)
    method = options.method or _METHODS[next(iter(uses))]
    if options.method is None and len(uses) > 1:
        # Flags of rewards are for methods that learn from them.
        default_method = "grpo" if options.reward else None
        names = [_METHODS[way] for way in uses]
        method = ask(
            f"Method: {' or '.join(names)}; the rows have responses to imitate", default_method, method, OneOf(names).fault
        )
    rows = uses[METHODS[method].learns_from]
    offline = METHODS[method].offline
    if offline:
        rewards: tuple[str, ...] = ()
    else:
        question = f"Reward: names with commas between, path.py:function, or {BY_SOURCE} for that of each row's data_source"
        proposed = BY_SOURCE if rows.is_by_source else rows.reward or ""
        named = ask(question, options.reward, proposed, partial(_reward_fault, rows.has_truth))
        rewards = () if named == BY_SOURCE else tuple(name.strip() for name in named.split(","))
    gpus = int(ask("GPUs: how many; 0 runs on the CPU", options.gpus, str(visible_gpus()), _count_fault))
    engine = "transformers"
    if not offline:
        engine = ask(f"Engine: {', '.join(ENGINES)}", options.engine, propose_engine(), OneOf(ENGINES).fault)
    answers = Answers(
        model=model,
        positions=MOST_PROMPT + MOST_RESPONSE if spec is None else spec.max_positions,
        train=train,
        val=options.val or validation_of(train),
        columns=rows.columns,
        rows=rows.count,
        rewards=rewards,
        layout="megatron:d1",
        is_cpu=gpus == 0,
        engine=engine,
        method=method,
    )
    return _laid_out(answers, spec, max(1, gpus))


def _ask(question: str, flag: str | None, proposed: str, fault: Callable[[str], str | None], yes: bool) -> str:
    """Return the answer, from a flag, from --yes, or from the user; ask again until it is valid."""
    topic = question.partition(":")[0]
    while flag is None and not yes:
        try:
            answer = input(f"{question} [{proposed}]\n> ").strip() or proposed
        except EOFError:
            raise UserError(
                f"init needs an answer to: {question}; give it as a flag, or take {proposed!r} with --yes"
            ) from None
        if (wrong := fault(answer)) is None:
            return answer
        print(f"{topic} {wrong}")
    answer = proposed if flag is None else flag
    if (wrong := fault(answer)) is not None:
        raise UserError(f"--{topic.lower()} {wrong}")
    return answer


def _model_fault(answer: str) -> str | None:
    if Path(answer).is_dir():
        try:
            load_spec(answer)
        except UserError as error:
            return f"cannot be {answer}: {error}"
        return None
    if is_hub_id(answer):
        return None
    return f"must be a directory or a hub id, as {HUB_MODEL}: got {answer!r}"


def _data_fault(answer: str) -> str | None:
    if Path(answer).suffix in (".parquet", ".jsonl", ".json") or Path(answer).is_dir() or HubDataSet.parse(answer):
        return None
    return f"must be {FORMS}: got {answer!r}"


def _count_fault(answer: str) -> str | None:
    return None if answer.isdecimal() and int(answer) <= 4096 else f"must be a number from 0 to 4096: got {answer!r}"


def _reward_fault(has_truth: bool, answer: str) -> str | None:
    names = [name.strip() for name in answer.split(",")]
    if not has_truth and (lacking := [name for name in names if name in ("", BY_SOURCE) or needs_truth(name)]):
        fault = f"cannot be {', '.join(lacking)}" if any(lacking) else "must be named"
        return f"{fault}: the rows have no ground truth; name its column with --answer-key, or a path.py:function"
    if answer == BY_SOURCE:
        return None
    try:
        for name in names:
            check_name(name)
    except UserError as error:
        return f"cannot be {answer!r}: {error}"
    return None


def _look_at(train: str, options: argparse.Namespace) -> dict[LearnsFrom, Rows]:
    learns_from = METHODS[options.method].learns_from if options.method else None
    if Path(train).exists() or HubDataSet.parse(train):
        file = local_file(train, "train", cache_of(DataConfig()))
        return look_at(train, file, learns_from, options.prompt_key, options.answer_key)
    # The file of `fivefold data`, which has not run yet.
    way = learns_from or "rollouts"
    return {way: Rows(way, Columns(), _UNKNOWN_ROWS, "gsm8k", is_by_source=way == "rollouts")}


def _laid_out(answers: Answers, spec: ModelSpec | None, gpus: int) -> Answers:
    """Return the answers with the fewest tensor-parallel ranks among the layouts with the fewest errors of `check`.

    The model must be divisible, and fit.
    """
    choices = [shards for shards in (1, 2, 4, _MOST_SHARDS) if gpus % shards == 0]
    if spec is None:
        choices = choices[:1]
    tried = []
    for shards in choices:
        replicas = gpus // shards
        engine = answers.engine
        if engine != "transformers":
            engine = f"{engine}:d{replicas}t{shards}"
        laid = replace(answers, layout=f"megatron:d{replicas}" + (f"t{shards}" if shards > 1 else ""), engine=engine)
        tried.append((len(check(build(RunConfig, read_mapping(write(laid), "run.yaml"))).errors), shards, laid))
    return min(tried, key=lambda layout: layout[:2])[2]
