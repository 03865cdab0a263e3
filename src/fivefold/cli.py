"""The command line: parse, call, exit."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold import __version__
from fivefold.commands import flags
from fivefold.errors import UserError, sentence_of
from fivefold.terminal import plain, plain_output

if TYPE_CHECKING:
    from fivefold.config import RunConfig
    from fivefold.config.dialect import SystemDialect, Translation
    from fivefold.keys.findings import Findings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `fivefold` command and return the exit code."""
    parser = _parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help()
        return 2
    options, rest = parser.parse_known_args(arguments)
    # argparse does not accept key=value arguments after an option; another system's command has its own options.
    if getattr(options, "system", None) is not None:
        options.words = _words_of(sys.argv[1:] if arguments is None else arguments)
        rest = []
    elif "=" in (getattr(options, "config", None) or "") and not Path(options.config).exists():
        options.config, options.overrides = None, [options.config, *options.overrides]
    if rest and (not hasattr(options, "overrides") or any(item.startswith("-") or "=" not in item for item in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest
    names_run = getattr(options, "config", None) or getattr(options, "overrides", None) or getattr(options, "system", None)
    if hasattr(options, "config") and not names_run and options.call is not _plan:
        parser.error(
            "name the YAML file of the run, which `fivefold init` writes, its keys as in model.path=DIR, or another system"
            " with --from"
        )
    try:
        with plain_output():
            return int(options.call(options) or 0)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of the pipe has closed it, as `head` does. Otherwise Python would write the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        if (sentence := sentence_of(error)) is None:
            raise
        print(f"fivefold: {plain(sentence)}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    from fivefold.config.roles import LEARNERS

    parser = argparse.ArgumentParser(prog="fivefold", description="RL post-training of language models on Megatron-Core")
    parser.add_argument("--version", action="version", version=f"fivefold {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, call: object, summary: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=summary)
        added.set_defaults(call=call)
        return added

    def configured(added: argparse.ArgumentParser) -> None:
        added.add_argument("config", nargs="?", help="YAML file of the run; train and check take its keys without one")
        added.add_argument("overrides", nargs="*", metavar="key=value", help="set a key, for example trainer.steps=10")

    def translated(added: argparse.ArgumentParser) -> None:
        added.add_argument(
            "--from",
            dest="system",
            metavar="SYSTEM",
            help="read the run of verl, siirl, trinity, roll, areal, skyrl or trl; skyrl@2026-03 has the defaults of then",
        )
        added.add_argument(
            "--env", action="append", default=[], metavar="NAME=value", help="a variable that its script leaves open"
        )
        added.add_argument(
            "--allow-secrets",
            action="store_true",
            help="let variables whose names say TOKEN, KEY, SECRET or PASSWORD into the configuration",
        )
        configured(added)

    def verbose(added: argparse.ArgumentParser) -> None:
        added.add_argument(
            "--verbosity", choices=["quiet", "normal", "debug"], help="lines in the terminal, in place of trainer.verbosity"
        )

    flags.init(command("init", _init, "write a commented YAML file of a run, from five questions or flags"))
    flags.completion(command("completion", _completion, "print what makes a shell complete subcommands, options and keys"))
    flags.doctor(command("doctor", _doctor, "say what this machine has for a run, and what is missing for what"))
    added = command("train", _train, "train; alone it starts the ranks of the layout, under torchrun it joins them")
    verbose(added)
    translated(added)
    translated(command("check", _check, "say whether a run can start: keys, types, layout, files"))
    added = command("plan", _plan, "find the layouts and settings that train a model fastest on so many GPUs, without any")
    flags.plan(added)
    configured(added)
    added = command(
        "convert", _convert, "write another system's script, YAML or arguments as our YAML, with what became of each key"
    )
    added.add_argument(
        "--strict",
        action=argparse.BooleanOptionalAction,
        help="--strict fails on settings that change only speed too; --no-strict accepts a run without what is refused",
    )
    translated(added)
    added = command("eval", _eval, "evaluate a checkpoint on the validation files of a run")
    verbose(added)
    added.add_argument("--checkpoint", help="checkpoint directory; the latest of the run when left out")
    added.add_argument("config", nargs="?", metavar="RUN", help="directory of the run, or a YAML file")
    added.add_argument("overrides", nargs="*", metavar="key=value", help="set a key, for example eval.samples=16")
    added = command(
        "export", _export, "write a checkpoint as a Hugging Face directory, as one of Megatron-Core, or for PEFT"
    )
    added.add_argument(
        "checkpoint",
        type=Path,
        metavar="RUN",
        help="directory of a run, for its latest checkpoint, or a checkpoint",
    )
    flags.export(added, LEARNERS)
    flags.report(
        command("report", _report, "write RUN/report.html, or serve it: curves, stage times, samples of one run or several")
    )
    flags.watch(command("watch", _watch, "show runs in the terminal, live: curves, stage times, samples"))
    flags.track(command("track", _track, "send a run that has ended to trackers, as far as they have not got it"))
    added = command("data", _data, "write a data set as train and test parquet")
    added.add_argument("name", choices=["gsm8k", "math", "deepscaler", "arithmetic"])
    added.add_argument("--source", type=Path, nargs="*", default=[], help="local files instead of the hub")
    added.add_argument("--out", type=Path, required=True)
    added.add_argument("--limit", type=int, help="at most so many rows of each split (arithmetic: training problems)")
    added.add_argument("--seed", type=int, default=0)
    added.add_argument("--form", choices=["verl", "areal"], default="verl", help="what follows a question (default verl)")
    added.add_argument("--below", type=int, default=100, help="arithmetic: sums of two numbers below this")
    added = command("train-tokenizer", _train_tokenizer, "train a small tokenizer on the texts of data files")
    added.add_argument("kind", choices=["char", "bpe"])
    added.add_argument("--data", nargs="+", required=True, help="parquet or jsonl files with prompt and response")
    added.add_argument("--out", type=Path, required=True)
    added.add_argument("--vocabulary", type=flags.above_0(int), default=1024, help="size of a bpe vocabulary")
    added = command("init-model", _init_model, "make a small model with random weights, in a Hugging Face directory")
    added.add_argument("family", choices=["llama", "mistral", "qwen2", "qwen3"])
    added.add_argument("--tokenizer", required=True, help="directory whose tokenizer it takes over")
    added.add_argument("--out", type=Path, required=True)
    for name, default in [("hidden", 64), ("layers", 4), ("heads", 4), ("kv-heads", 2), ("ffn", 192), ("positions", 512)]:
        added.add_argument(f"--{name}", type=flags.above_0(int), default=default)
    added.add_argument("--untied", action="store_true", help="give the output layer its own weight")
    added.add_argument("--seed", type=int, default=0)
    return parser


_OWN_OPTIONS = {"--from": 1, "--env": 1, "--verbosity": 1, "--strict": 0, "--no-strict": 0, "--allow-secrets": 0}


def _words_of(arguments: Sequence[str]) -> list[str]:
    """Return the words of another system's command: all words except our subcommand and options, in order."""
    words, rest = [], iter(arguments[1:])
    for word in rest:
        name, equals, _ = word.partition("=")
        if name not in _OWN_OPTIONS:
            words.append(word)
        elif _OWN_OPTIONS[name] and not equals:
            next(rest, None)
    return words


def _translate(options: argparse.Namespace) -> Translation:
    from fivefold.config import ConfigError

    variables = [assignment.partition("=") for assignment in options.env]
    if unset := [name for name, equals, _ in variables if not equals]:
        raise ConfigError([f"--env is written NAME=value: got {unset[0]}"])
    environment = dict(os.environ) if options.allow_secrets else {}
    environment |= {name: value for name, _, value in variables}
    version = options.system.partition("@")[2]
    return _system(options).translate_words(options.words, os.environ, environment, version=version)


def _system(options: argparse.Namespace) -> SystemDialect:
    """Return the dialect that `--from SYSTEM` or `--from SYSTEM@VERSION` names."""
    from fivefold.config.dialect import find_system

    return find_system(options.system.partition("@")[0])


def _configure(options: argparse.Namespace, quiet: bool = False) -> RunConfig:
    """Return the validated configuration of the run that the command line describes."""
    from fivefold.config import ConfigError, RunConfig

    if options.system is None and options.config is not None:
        return _with_verbosity(RunConfig.from_yaml(options.config, options.overrides), options)
    if options.system is None:
        return _with_verbosity(RunConfig.from_overrides(options.overrides), options)
    translation = _translate(options)
    if translation.refusals:
        raise ConfigError([f"this run of {options.system} is not supported here:", *translation.refusals])
    config = _with_verbosity(RunConfig.from_tree(translation.tree), options)
    if not quiet and config.trainer.verbosity != "quiet":
        for note in _system(options).notes(translation):
            print(f"note     {note}")
    return config


def _with_verbosity(config: RunConfig, options: argparse.Namespace) -> RunConfig:
    """Return the configuration with the verbosity of the command line, if it has one."""
    chosen = getattr(options, "verbosity", None) or config.trainer.verbosity
    return replace(config, trainer=replace(config.trainer, verbosity=chosen))


def _convert(options: argparse.Namespace) -> int:
    if options.system is None:
        raise UserError("convert needs --from and a system: verl, siirl, trinity, roll, areal, skyrl or trl")
    translation = _translate(options)
    for refusal in translation.refusals:
        print(f"{'error   ' if refusal in translation.faults else 'refused '} {refusal}", file=sys.stderr)
    is_lenient = options.strict is False
    print(_system(options).write(translation, strict=not is_lenient), end="")
    lacks_any = options.strict and any(outcome.kind == "unsupported" for outcome in translation.outcomes)
    return 2 if translation.faults or lacks_any or (translation.refusals and not is_lenient) else 0


def _train(options: argparse.Namespace) -> int:
    from fivefold.launch import environment
    from fivefold.launch.start import start
    from fivefold.observability.start_up import VARIABLE, created_at

    if environment.launched_externally():
        environment.complete()
    else:
        os.environ[VARIABLE] = str(created_at())
    first = os.environ.get("RANK", "0") == "0"
    config = _configure(options, quiet=not first)
    is_quiet = not first or config.trainer.verbosity == "quiet"
    return 2 if _show_check(config, quiet=is_quiet).starting() else start(config)


def _show_check(config: RunConfig, quiet: bool = False, starts: bool = True) -> Findings:
    """Print and return what is found. If the run `starts` now, it prints its summary itself."""
    from fivefold.plan.check import check

    findings = check(config)
    if not quiet:
        for note in [
            *([] if starts else findings.summary),
            *findings.duration,
            *findings.notes,
            *([] if starts else findings.missing),
            *(f"{key} has no effect: {reason}" for key, reason in findings.ignored),
        ]:
            print(f"note     {note}")
    for error in findings.starting() if starts else findings.errors:
        print(f"error    {error}", file=sys.stderr)
    return findings


def _check(options: argparse.Namespace) -> int:
    findings = _show_check(_configure(options), starts=False)
    print("this run cannot start" if findings.errors else "this run can start")
    if findings.trial and options.system is None:
        words = [*([options.config] if options.config else []), *options.overrides]
        print(f"try it   {shlex.join(['fivefold', 'train', *words, *findings.trial])}")
    return 2 if findings.errors else 0


def _plan(options: argparse.Namespace) -> int:
    if options.calibrate:
        return _calibrate(options)
    from fivefold.config.loader import override, read
    from fivefold.plan import proposal
    from fivefold.plan.estimate import Lengths
    from fivefold.plan.hardware import NETWORK_GB_S, Cluster

    if options.gpus is None:
        raise UserError("say how many GPUs there are: --gpus N")
    gpu = proposal.gpu_or_refuse(options.gpu)
    network = options.network or NETWORK_GB_S
    cluster = Cluster(gpu, options.gpus, min(options.node_gpus, options.gpus), network, options.price)
    changes = override({} if options.model is None else {"model": {"path": options.model}}, options.overrides)
    base = proposal.base_run({} if options.config is None else read(options.config), changes)
    lengths = Lengths.of(base.data, options.prompt_tokens, options.response_tokens)
    has_file = options.config is not None
    proposed = proposal.propose(base, cluster, lengths, options.top, options.calibration, changes=changes, has_file=has_file)
    print(json.dumps(proposal.as_json(proposed), indent=1) if options.json else proposal.describe(proposed))
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    from fivefold.calibration import calibrate

    print(f"rates: {calibrate(options.calibration, options.seconds, partial(print, flush=True))}")
    return 0


def _eval(options: argparse.Namespace) -> int:
    from fivefold.checkpoint.checkpoints import Checkpoints
    from fivefold.checkpoint.manifest import find_corruption
    from fivefold.config import RunConfig
    from fivefold.distributed.scratch import scratch_directory
    from fivefold.launch.start import start

    if options.config is None:
        raise UserError("eval needs the directory of a run, or its YAML file")
    path, log = Path(options.config), partial(print, file=sys.stderr)
    # A run's directory may have been moved since it was written down.
    moved = [f"trainer.run_dir={path}"] if path.is_dir() else []
    config = RunConfig.from_yaml(path / "run.yaml" if path.is_dir() else path, [*moved, *options.overrides])
    config = _with_verbosity(config, options)
    if not config.data.val:
        raise UserError("nothing to evaluate: name validation files, as in data.val=[FILE.jsonl]")
    checkpoint = Path(options.checkpoint) if options.checkpoint else Checkpoints(config.run_dir, 1).latest(log)
    if checkpoint is None:
        raise UserError(f"no checkpoint in {config.run_dir / 'checkpoints'}; name one with --checkpoint")
    if not options.checkpoint:
        log(f"{checkpoint} is the latest checkpoint of {config.run_dir}")
    if faults := find_corruption(checkpoint):
        raise UserError(f"checkpoint {checkpoint} cannot be used: {faults}")
    if _show_check(config, quiet=True).starting():
        return 2
    # An evaluation has its own directory, because the run itself may be training now. Other nodes of a cluster see only the
    # run's directory of this machine.
    scratch = config.run_dir / f"fivefold-eval-{os.getpid()}" if config.launch.backend == "ray" else scratch_directory()
    loggers = list(filter(lambda name: name == "console", config.trainer.loggers))

    try:
        return start(replace(config, trainer=replace(config.trainer, run_dir=str(scratch), loggers=loggers)), checkpoint)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _export(options: argparse.Namespace) -> int:
    from fivefold.checkpoint.export import export
    from fivefold.hub import check_push, push

    if options.push is not None:
        if options.to == "megatron":
            raise UserError("--push is for forms that the hub's users load: huggingface or adapter, not megatron")
        check_push(options.push)
    path, out, gb = options.checkpoint, options.out, options.shard_gb
    print(export(path, out, gb, options.model, options.to, options.dtype, options.push))
    if options.push is not None:
        print(f"pushed to {push(options.out, options.push)}")
    return 0


def _init(options: argparse.Namespace) -> int:
    from fivefold.commands.init import init

    return init(options)


def _completion(options: argparse.Namespace) -> int:
    from fivefold.commands.completion import completion

    print(completion(_parser(), options.shell), end="")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from fivefold.commands.doctor import doctor

    return doctor(options)


def _report(options: argparse.Namespace) -> int:
    from fivefold.observability.curve import plot
    from fivefold.observability.report import write_report
    from fivefold.observability.serve import serve

    if options.plot:
        print(plot(options.runs[0], options.plot))
    if options.serve:
        serve(options.runs, options.host, options.port, lambda text: print(text, flush=True))
    else:
        print(f"report: {write_report(options.runs)}")
    return 0


def _watch(options: argparse.Namespace) -> int:
    from fivefold.observability.watch import watch

    watch(options.runs, once=options.once, seconds=options.every)
    return 0


def _track(options: argparse.Namespace) -> int:
    from fivefold.observability.trackers.trackers import send_again

    send_again(options.run, options.to, options.wait, print)
    return 0


def _data(options: argparse.Namespace) -> int:
    from fivefold.data.prepare import prepare

    for split, rows in prepare(
        options.name, options.out, options.source, options.limit, options.seed, options.below, options.form
    ).items():
        print(f"{options.out / split}.parquet: {rows} rows")
    return 0


def _train_tokenizer(options: argparse.Namespace) -> int:
    from fivefold.data.rows import read_rows
    from fivefold.data.tokenizer import texts_of, train_tokenizer

    texts = [text for name in options.data for row in read_rows(Path(name)) for text in texts_of(row)]
    size = train_tokenizer(options.kind, texts, options.out, options.vocabulary)
    print(f"{options.out}: {options.kind} tokenizer with {size} tokens")
    return 0


def _init_model(options: argparse.Namespace) -> int:
    from fivefold.data.tokenizer import make_model

    sizes = {name: getattr(options, name) for name in ("hidden", "layers", "heads", "kv_heads", "ffn", "positions")}
    count = make_model(options.family, options.tokenizer, options.out, tied=not options.untied, seed=options.seed, **sizes)
    print(f"{options.out}: {options.family} with {count:,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
