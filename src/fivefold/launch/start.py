"""Starts a run from the command line or from Python: joins the existing ranks, or spawns them."""

from __future__ import annotations

import shlex
import signal
from functools import partial
from pathlib import Path

from fivefold.checkpoint.checkpoints import LATEST, Checkpoints, RunState
from fivefold.checkpoint.fingerprint import Fingerprint
from fivefold.config import ConfigError, RunConfig, dump_yaml
from fivefold.config.models_read import models_read
from fivefold.downloads import download
from fivefold.errors import RunError
from fivefold.files import run_umask, write_whole
from fivefold.launch import environment, local
from fivefold.launch.lock import locked
from fivefold.launch.run_directory import check_run_directory
from fivefold.launch.watch import ASKED, name_of
from fivefold.plan.check import check


def start(config: RunConfig, checkpoint: Path | None = None) -> int:
    """Train the run of a validated configuration on every rank of its layout, or evaluate a checkpoint; returns the exit
    code.

    Under torchrun or srun this process is a rank already: it does the work and ends.
    """
    if config.launch.backend == "auto" and environment.launched_externally():
        from fivefold.launch.rank import main as rank_main

        rank_main(config, checkpoint)
    with run_umask(config.trainer.umask):
        if checkpoint is None:
            return _train(config)
        _download(config, checkpoint)
        return _spawn(config, checkpoint)


def _train(config: RunConfig) -> int:
    check_run_directory(config.run_dir)
    with locked(config.run_dir) as lock:
        # The ranks check again, with the content of the hub's models. Without this check, starting ranks only to fail would
        # cost minutes.
        checkpoint = Checkpoints(config.run_dir, config.trainer.keep).find(config.trainer.resume, lambda text: None)
        if checkpoint is not None:
            Fingerprint.of(config, config.trainer.steps, {}).compare(RunState.read(checkpoint).fingerprint).check(checkpoint)
        _download(config, checkpoint)
        if config.launch.backend != "ray":
            code = _spawn(config, None, *lock)
    if config.launch.backend == "ray":
        # The node of rank 0 now locks the directory, and holds it until the last of its processes has ended.
        code = _spawn(config, None)
    if code in ASKED and (command := resume_command(config)):
        print(f"to resume this run:\n{command}", flush=True)
    return code


def _download(config: RunConfig, checkpoint: Path | None) -> None:
    """Download models and data sets before the ranks of this machine start; those of other machines do it themselves."""
    if config.launch.backend != "ray":
        download(models_read(config), config.data, {} if checkpoint is None else RunState.read(checkpoint).commits)


def resume_command(config: RunConfig) -> str:
    """Return the command that resumes a run from its latest checkpoint; empty if it has none."""
    file = config.run_dir / "run.yaml"
    if not file.is_file() or not (config.run_dir / "checkpoints" / LATEST).is_file():
        return ""
    auto = [] if config.trainer.resume == "auto" else ["trainer.resume=auto"]
    return shlex.join(["fivefold", "train", str(file), *auto])


def _spawn(config: RunConfig, checkpoint: Path | None, *inherited: int) -> int:
    """Start the ranks; each reads the configuration from one file in the run's logs."""
    log_dir = config.run_dir / "logs"
    requested = log_dir / "requested.yaml"
    hand_over = partial(write_whole, requested, dump_yaml(config))
    arguments = ["fivefold.launch.rank", str(requested), *([] if checkpoint is None else [str(checkpoint)])]
    if config.launch.backend == "ray":
        # Ray is imported only for this backend: others need neither Ray nor its import time.
        from fivefold.launch.ray import driver

        return driver.spawn(arguments, hand_over, log_dir, config.roles, config.engine, config.trainer, config.launch)
    hand_over()
    return local.spawn(arguments, config.roles.world_size, log_dir, config.launch, inherited, bool(config.engine.url))


def train(config: RunConfig) -> Path:
    """Train as `fivefold train` does; returns the run directory, with metrics, samples and checkpoints.

    Raises ConfigError with everything that prevents the run from starting. Raises UserError if another run holds the
    directory or left a checkpoint of something else in it, and RunError if the run failed. Ctrl-C, or a notebook's stop
    button, saves the run and raises KeyboardInterrupt with the command that resumes it.

    Every rank loads functions of the configuration from the file that defines them. So the code in that file that starts the
    run must be under `if __name__ == "__main__"`. Under torchrun the process ends with the run.

    Example: `train(RunConfig.from_yaml("run.yaml", ["trainer.steps=3"]))`.
    """
    if errors := check(config).starting():
        raise ConfigError(errors)
    if (code := start(config)) in ASKED:
        number, command = code - 128, resume_command(config)
        kind = KeyboardInterrupt if number == signal.SIGINT else RunError
        raise kind(f"the run was asked to end by {name_of(number)}" + (f"; to resume it:\n{command}" if command else ""))
    if code:
        raise RunError(f"the run ended with exit code {code}; what its ranks left is in {config.run_dir / 'logs'}")
    return config.run_dir
