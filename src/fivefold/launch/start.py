"""Starts a run from the command line or from Python: joins the existing ranks, or spawns them."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from fivefold.checkpoint.checkpoints import Checkpoints, RunState
from fivefold.checkpoint.fingerprint import Fingerprint
from fivefold.config import ConfigError, RunConfig, dump_yaml
from fivefold.distributed.scratch import scratch_directory
from fivefold.files import use_umask
from fivefold.launch import environment, local
from fivefold.launch.lock import locked
from fivefold.launch.run_directory import check_run_directory
from fivefold.plan.check import check


def start(arguments: list[str], config: RunConfig) -> int:
    """Run `python -m fivefold.launch.rank ARGUMENTS` as every rank of the layout; returns the exit code.

    Under torchrun or srun this process is a rank already: it does the work and ends.
    """
    if config.launch.backend == "auto" and environment.launched_externally():
        from fivefold.launch.rank import main as rank_main

        rank_main(arguments)
    use_umask(config.trainer.umask)
    if arguments[0] != "train":
        return _spawn(arguments, config)
    check_run_directory(config.run_dir)
    with locked(config.run_dir) as lock:
        # The ranks check again, with the content of the hub's models. Without this check, starting ranks only to fail would
        # cost minutes.
        found = Checkpoints(config.run_dir, config.trainer.keep).find(config.trainer.resume, lambda text: None)
        if found is not None:
            Fingerprint.of(config, config.trainer.steps, {}).compare(RunState.read(found).fingerprint).check(found)
        if config.launch.backend != "ray":
            return _spawn(arguments, config, *lock)
    # The node of rank 0 now locks the directory, and holds it until the last of its processes has ended.
    return _spawn(arguments, config)


def _spawn(arguments: list[str], config: RunConfig, *inherited: int) -> int:
    module = "fivefold.launch.rank"
    if config.launch.backend == "ray":
        # Ray is imported only for this backend: others need neither Ray nor its import time.
        from fivefold.launch.ray import driver

        return driver.spawn([module, *arguments], config)
    log_dir, reaches_others = config.run_dir / "logs", bool(config.engine.url)
    return local.spawn([module, *arguments], config.roles.world_size, log_dir, config.launch, inherited, reaches_others)


def train(config: RunConfig) -> Path:
    """Train as `fivefold train` does; returns the run directory, with metrics, samples and checkpoints.

    Raises ConfigError with everything that prevents the run from starting. Raises ValueError if another run holds the
    directory or left a checkpoint of something else in it, and RuntimeError if the run failed.

    Every rank loads functions of the configuration from the file that defines them. So the code in that file that starts the
    run must be under `if __name__ == "__main__"`. Under torchrun the process ends with the run.
    """
    if errors := check(config).errors:
        raise ConfigError(errors)
    # Several starts may write here before one of them holds the directory. Other nodes see nothing else of this machine.
    on_ray = config.launch.backend == "ray"
    if on_ray:
        use_umask(config.trainer.umask)
        check_run_directory(config.run_dir)
        config.run_dir.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="fivefold-", dir=config.run_dir)) if on_ray else scratch_directory()
    try:
        requested = directory / "requested.yaml"
        requested.write_text(dump_yaml(config))
        if code := start(["train", str(requested)], config):
            raise RuntimeError(f"the run ended with exit code {code}; what its ranks left is in {config.run_dir / 'logs'}")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return config.run_dir
