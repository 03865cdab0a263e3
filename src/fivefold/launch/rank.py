"""One rank: joins the others, builds its parts, does its command. `python -m fivefold.launch.rank COMMAND ...`."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import psutil

from fivefold.distributed.processes import descendants, kill
from fivefold.errors import describe_error
from fivefold.launch.local import FAILED, end_with_launcher

if TYPE_CHECKING:
    import torch

    from fivefold.config import RunConfig
    from fivefold.distributed.ranks import Ranks


@dataclass
class Interrupt:
    """Remembers that the run was asked to end."""

    number: int = 0

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            end_process(128 + number)
        self.number = number

    def requested(self) -> bool:
        return self.number != 0


def main(arguments: list[str] | None = None) -> NoReturn:
    """`train CONFIG [OVERRIDE ...]` or `eval CONFIG CHECKPOINT [OVERRIDE ...]` on this rank, then end."""
    end_with_launcher()
    interrupt = Interrupt()
    interrupt.install()
    try:
        _run(list(sys.argv[1:] if arguments is None else arguments), interrupt)
    except BaseException as error:
        _leave_error(describe_error(error))
        end_process(FAILED)
    end_process(128 + interrupt.number if interrupt.number else 0)


def end_process(code: int) -> NoReturn:
    """End this rank and the processes that it or Megatron-Core's saving started, whatever they are doing."""
    sys.stdout.flush()
    sys.stderr.flush()
    kill(descendants(psutil.Process()))
    os._exit(code)


def _leave_error(text: str) -> None:
    """Where the launcher finds it, or on this rank's own stderr."""
    directory = os.environ.get("FIVEFOLD_LOG_DIR")
    if directory is None:
        print(f"rank {os.environ.get('RANK')} failed:\n{text}", file=sys.stderr, flush=True)
    else:
        (Path(directory) / f"rank-{os.environ['RANK']}.error").write_text(text)


def _run(arguments: list[str], interrupt: Interrupt) -> None:
    import torch

    from fivefold.config import load_config
    from fivefold.distributed.ranks import Ranks
    from fivefold.megatron import mesh

    command, path, *rest = arguments
    checkpoint = rest.pop(0) if command == "eval" else None
    config = load_config(path, rest)
    device = choose_device(config.trainer.device)
    if config.trainer.deterministic:
        # Read when the libraries start: cuBLAS must keep its workspaces apart, NCCL must always sum in the same order.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh.init_process_group(device, config.launch.timeout_minutes)
    ranks = Ranks(config.layout)
    if command == "train":
        train(config, ranks, device, interrupt)
    else:
        assert checkpoint is not None
        evaluate(config, Path(checkpoint), ranks, device, interrupt)
    mesh.destroy()


def choose_device(wanted: str) -> torch.device:
    """This rank's device: its own GPU, or the CPU."""
    import torch

    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    local_rank, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= found:
        raise ValueError(
            f"local rank {local_rank} needs a GPU of its own: found {found}; lower the layout or set trainer.device=cpu"
        )
    return torch.device("cuda", local_rank)


def train(config: RunConfig, ranks: Ranks, device: torch.device, interrupt: Interrupt) -> None:
    from fivefold.build import build_run
    from fivefold.trainer.train import train as loop

    run = build_run(config, ranks, device, interrupt.requested)
    try:
        loop(run)
    finally:
        run.close()


def evaluate(config: RunConfig, checkpoint: Path, ranks: Ranks, device: torch.device, interrupt: Interrupt) -> None:
    from fivefold.build import build_run

    run = build_run(config, ranks, device, interrupt.requested)
    try:
        if run.trainer.evaluation is None:
            raise ValueError("nothing to evaluate: name validation files in data.val")
        run.models.policy.load(checkpoint / "policy")
        metrics, _ = run.trainer.evaluation.measure(run.models)
        if ranks.is_main:
            print(json.dumps({"checkpoint": str(checkpoint), **metrics}, indent=1))
    finally:
        run.close()


if __name__ == "__main__":
    main()
