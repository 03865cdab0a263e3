"""Runs one rank: joins the others, builds its parts, trains or evaluates.

Launchers start it as `python -m fivefold.launch.rank FILE [CHECKPOINT]`, with the file of the configuration.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import psutil

from fivefold.distributed.compiler_caches import use_compiler_caches
from fivefold.distributed.processes import descendants, kill
from fivefold.distributed.pulse import Pulse
from fivefold.distributed.scratch import remove_scratch
from fivefold.errors import UserError, describe_error
from fivefold.files import use_umask
from fivefold.launch import environment, last_words
from fivefold.launch.deaths import is_loss
from fivefold.launch.lock import locked
from fivefold.launch.processes import allow_open_files, end_with_launcher, has_launcher
from fivefold.launch.run_directory import check_run_directory
from fivefold.launch.watch import FAILED, PAUSE, name_of
from fivefold.observability.start_up import start_up
from fivefold.terminal import plain_output

if TYPE_CHECKING:
    import torch

    from fivefold.config import RunConfig
    from fivefold.distributed.ranks import Ranks


_LOSS_SECONDS = 2.0
"""Seconds in which a rank may fail by itself after another one is gone."""
_LATER = 3
"""Factor on the silence limit for ranks that a launcher watches, before they end by themselves."""


class Requests:
    """Stores the signals that asked this rank to end. Until they are watched, a signal ends the rank at once.

    Python runs a signal's handler only when the main thread returns to Python code, and that thread may wait for other ranks
    for minutes. So the signal's number is also written to a pipe at once, which another thread can read.
    """

    def __init__(self) -> None:
        self._pipe, end = os.pipe()
        for file in (self._pipe, end):
            os.set_blocking(file, False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)
        signal.set_wakeup_fd(end, warn_on_full_buffer=False)
        self.is_watched = False
        self._first, self._since = 0, 0.0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.is_watched:
            end_process(128 + number)

    def first(self) -> int:
        """Returns the signal that came first, or 0. A second Ctrl-C ends this rank at once.

        Other signals may come more than once: Slurm, torchrun and systemd send them to every process of a run, and some
        processes forward them.
        """
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._pipe, 100):
                if number not in (signal.SIGINT, signal.SIGTERM):
                    continue
                if not self._first:
                    self._first, self._since = number, time.monotonic()
                elif number == signal.SIGINT and time.monotonic() > self._since + PAUSE:
                    end_process(128 + number)
        return self._first


def main(config: RunConfig | None = None, checkpoint: Path | None = None) -> NoReturn:
    """Train a run on this rank, or evaluate a checkpoint, then end.

    Without a configuration, one of our launchers started this process, and its arguments name the file to read it from.
    """
    end_with_launcher()
    allow_open_files()
    start_up.begin()
    requests, pulse = Requests(), Pulse()
    pulse.start()
    plain = contextlib.ExitStack()
    plain.enter_context(plain_output())
    try:
        if config is None:
            config, checkpoint = _from_launcher(*map(Path, sys.argv[1:]))
        code = _run(config, checkpoint, requests, pulse)
    except BaseException as error:
        _leave_error(describe_error(error), "lost" if is_loss(error) else "error")
        end_process(FAILED)
    end_process(code)


def _from_launcher(file: Path, checkpoint: Path | None = None) -> tuple[RunConfig, Path | None]:
    """Return the configuration that the launcher wrote, and the checkpoint to evaluate, if any."""
    from fivefold.config import RunConfig

    return RunConfig.restore(file), checkpoint


def end_process(code: int) -> NoReturn:
    """End this rank and the processes that it, or the saving of Megatron-Core, started, whatever they are doing."""
    # The streams may be files on a full disk.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    kill(descendants(psutil.Process()))
    remove_scratch(os.getpid())
    os._exit(code)


def _leave_error(text: str, kind: str) -> None:
    """Report an error to the launcher, or on this rank's own stderr; `kind` is `lost` if another rank has the reason."""
    if not last_words.leave(text, kind):
        did = "failed" if kind == "error" else "lost another rank, which has the reason"
        print(f"rank {os.environ.get('RANK')} on {socket.gethostname()} {did}:\n{text}", file=sys.stderr, flush=True)


def _end_after_loss(text: str) -> None:
    """End this rank after another one is gone. If this rank fails with its own error first, that error says more."""
    time.sleep(_LOSS_SECONDS)
    _leave_error(text, "lost")
    end_process(FAILED)


def _end_hung(text: str) -> None:
    """End this rank because its main thread is hung and others wait for it."""
    _leave_error(f"on {socket.gethostname()}: {text}", "error")
    end_process(FAILED)


def _run(config: RunConfig, checkpoint: Path | None, requests: Requests, pulse: Pulse) -> int:
    """Train, or evaluate `checkpoint`; returns the exit code."""
    import torch

    from fivefold.distributed import hosts
    from fivefold.distributed.heartbeat import Ends, Interrupted
    from fivefold.distributed.ranks import Ranks
    from fivefold.megatron import mesh

    environment.complete()
    use_umask(config.trainer.umask)
    if (fault := use_compiler_caches()) and os.environ["LOCAL_RANK"] == "0":
        print(f"warning  {fault}", file=sys.stderr, flush=True)
    device = choose_device(config.trainer.device)
    if config.trainer.deterministic:
        # The libraries read these at startup: cuBLAS must keep its workspaces separate, NCCL must always sum in the same
        # order.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
    if config.launch.threads is not None:
        torch.set_num_threads(config.launch.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh.init_process_group(device, config.launch.timeout_minutes)
    ranks = Ranks(config.layout, config.launch.timeout_minutes, config.roles.world_size)
    end_now = lambda number: end_process(128 + number)  # noqa: E731
    silent = config.launch.silent_seconds
    # A launcher detects by itself which rank is silent, and names it.
    unheard = _LATER * silent if has_launcher() else silent
    ends = Ends(requests.first, end_now, _end_after_loss, _end_hung, silent, unheard)
    names, differences = hosts.meet(ranks.world)
    for sentence in differences if ranks.is_main else ():
        print(f"warning  {sentence}", flush=True)
    ranks.heartbeat.start(ranks.whole_group(), ends, names, device.type == "cpu")
    pulse.describe, pulse.tick = lambda: (True, ranks.heartbeat.place), ranks.heartbeat.tick
    requests.is_watched = True
    code = 0
    try:
        if checkpoint is None:
            train(config, ranks, device)
        else:
            evaluate(config, checkpoint, ranks, device)
    except Interrupted as interrupted:
        code = 128 + interrupted.number
    ranks.heartbeat.close()
    mesh.destroy()
    return code


def choose_device(wanted: str) -> torch.device:
    """Returns this rank's device: its own GPU, or the CPU."""
    import torch

    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    local_rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local_rank >= gpus:
        raise UserError(
            f"local rank {local_rank} needs a GPU of its own: found {gpus}; lower the layout or set trainer.device=cpu"
        )
    return torch.device("cuda", local_rank)


def train(config: RunConfig, ranks: Ranks, device: torch.device) -> None:
    from fivefold.build import build_run
    from fivefold.checkpoint.resume import find_checkpoint
    from fivefold.distributed.calls import call_on_main
    from fivefold.distributed.heartbeat import Interrupted
    from fivefold.trainer.train import train as loop

    with contextlib.ExitStack() as held:
        if not has_launcher():
            call_on_main(ranks, lambda: _hold(config.run_dir, held))
        start_up.mark("imports")
        run = build_run(config, ranks, device, find_checkpoint(config.run_dir, config.trainer, ranks))
        start_up.mark("run")
        try:
            loop(run)
        except Interrupted as interrupted:
            if run.engine is not None:
                # The state to save may have to return to the device that it shares with the engine.
                run.engine.sleep()
            # The launcher has said which signal it got; it forwards all of them as SIGTERM.
            by = "" if has_launcher() else f" by {name_of(interrupted.number)}"
            run.trainer.save_interrupted(f"asked to end{by}")
            raise
        finally:
            run.close()


def _hold(run_dir: Path, held: contextlib.ExitStack) -> None:
    check_run_directory(run_dir)
    held.enter_context(locked(run_dir))


def evaluate(config: RunConfig, checkpoint: Path, ranks: Ranks, device: torch.device) -> None:
    """Print the metrics of a checkpoint as JSON on stdout, and everything else on stderr."""
    from fivefold.build import build_run

    with contextlib.redirect_stdout(sys.stderr):
        run = build_run(config, ranks, device, checkpoint, is_evaluation=True)
        try:
            if run.trainer.evaluation is None:
                raise UserError("nothing to evaluate: data.val has no responses, and the run does not sample")
            run.models.policy.load(checkpoint / "policy")
            metrics, _ = run.trainer.evaluation.measure(run.models)
            for sentence in run.logger.warnings.of(0, metrics)[1]:
                run.logger.log(f"warning  {sentence}")
        finally:
            run.close()
    if ranks.is_main:
        print(json.dumps({"checkpoint": str(checkpoint), **metrics}, indent=1))


if __name__ == "__main__":
    main()
