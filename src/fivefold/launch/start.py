"""Start a run from the command line or from Python: join the ranks that are there, or spawn them."""

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
    """Run `python -m fivefold.launch.rank ARGUMENTS` as every rank of the layout; the exit code.

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
        # The ranks look again, with the content of the hub's models; starting them to be refused would cost minutes.
        found = Checkpoints(config.run_dir, config.trainer.keep).find(config.trainer.resume, lambda text: None)
        if found is not None:
            Fingerprint.of(config, config.trainer.steps, {}).compare(RunState.read(found).fingerprint).check(found)
        if config.launch.backend != "ray":
            return _spawn(arguments, config, *lock)
    # The node of rank 0 takes the directory now: it holds it until the last of its processes has ended.
    return _spawn(arguments, config)


def _spawn(arguments: list[str], config: RunConfig, *inherited: int) -> int:
    module = "fivefold.launch.rank"
    if config.launch.backend == "ray":
        # Only who asks for it needs it, or waits for its import.
        from fivefold.launch.ray import driver

        return driver.spawn([module, *arguments], config)
    log_dir, reaches_others = config.run_dir / "logs", bool(config.engine.url)
    return local.spawn([module, *arguments], config.roles.world_size, log_dir, config.launch, inherited, reaches_others)


def train(config: RunConfig) -> Path:
    """Train as `fivefold train` does; the run directory, with metrics, samples and checkpoints.

    Raises ConfigError with everything that keeps the run from starting, ValueError where another run has the directory or
    left a checkpoint of something else in it, and RuntimeError where the run failed. Functions of the configuration are
    loaded by every rank from the file that defines them, so what starts the run in that file stands under
    `if __name__ == "__main__"`. Under torchrun the process ends with the run.
    """
    if errors := check(config).errors:
        raise ConfigError(errors)
    # Several starts may meet here before one of them has the directory; other nodes see nothing else of this machine.
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
