"""Start a run from the command line or from Python: join the ranks that are there, or spawn them."""

from __future__ import annotations

from pathlib import Path

from fivefold.config import ConfigError, RunConfig, dump_yaml
from fivefold.launch import local
from fivefold.plan.check import check


def start(arguments: list[str], config: RunConfig) -> int:
    """Run `python -m fivefold.launch.rank ARGUMENTS` as every rank of the layout; the exit code.

    Under torchrun this process is a rank already: it does the work and ends.
    """
    if local.launched_externally():
        from fivefold.launch.rank import main as rank_main

        rank_main(arguments)
    return local.spawn(
        ["fivefold.launch.rank", *arguments], config.layout.world_size, config.run_dir / "logs", config.launch.threads
    )


def train(config: RunConfig) -> Path:
    """Train as `fivefold train` does; the run directory, with metrics, samples and checkpoints.

    Raises ConfigError with everything that keeps the run from starting, and RuntimeError where it failed. Functions of the
    configuration are loaded by every rank from the file that defines them, so what starts the run in that file stands under
    `if __name__ == "__main__"`. Under torchrun the process ends with the run.
    """
    if errors := check(config).errors:
        raise ConfigError(errors)
    requested = config.run_dir / "logs" / "requested.yaml"
    requested.parent.mkdir(parents=True, exist_ok=True)
    requested.write_text(dump_yaml(config))
    if code := start(["train", str(requested)], config):
        raise RuntimeError(f"the run ended with exit code {code}; what its ranks left is in {requested.parent}")
    return config.run_dir
