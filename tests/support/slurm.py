"""Slurm on two hosts of this machine: a controller on the first, a node on each, and munge, all as Debian installs them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.commands import LONGEST
from tests.support.two_hosts import Host, Hosts

CONFIGURATION = """
ClusterName=pair
SlurmctldHost=north
SlurmUser=root
SlurmdUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=60
NodeName=north NodeAddr=10.77.0.1 CPUs=8 RealMemory=8000 Gres=gpu:2
NodeName=south NodeAddr=10.77.0.2 CPUs=8 RealMemory=8000 Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""


class Slurm:
    """A cluster of two nodes; both hosts end it."""

    def __init__(self, hosts: Hosts, directory: Path) -> None:
        """`directory`: where both hosts find its configuration."""
        self.hosts, self.directory = hosts, directory
        (directory / "state").mkdir(parents=True)
        (directory / "slurm.conf").write_text(CONFIGURATION.format(directory=directory))
        (directory / "gres.conf").write_text("Name=gpu File=/dev/tty[1-2]\n")
        key = directory / "munge.key"
        key.touch(0o400)
        key.write_bytes(secrets.token_bytes(128))
        for host in hosts:
            host.run("mkdir", "-p", "/run/munge", "/run/slurmd")
            host.start("munged", "--foreground", "--force", f"--key-file={key}", "--seed-file=/run/munge/seed",
                       "--log-file=/run/munge/log", "--pid-file=/run/munge/pid")  # fmt: skip
        self._wait(lambda: all(host.start("munge", "-n").wait() == 0 for host in hosts), "munge")
        self._start(hosts.north, "slurmctld", "-D")
        for host in hosts:
            self._start(host, "slurmd", "-D", "-N", host.name)
        self._wait(lambda: self.run("sinfo", "--noheader", "--Node", "--format=%T").split() == ["idle", "idle"], "slurmd")

    def _start(self, host: Host, *words: str) -> None:
        host.start(*words, "-f", self.directory / "slurm.conf", env={"SLURM_CONF": str(self.directory / "slurm.conf")})

    def run(self, *words: object, **env: str) -> str:
        """Returns what a command of Slurm said on the first host."""
        program = self.hosts.north.start(*words, env={"SLURM_CONF": str(self.directory / "slurm.conf"), **env})
        program.wait()
        return program.output.strip()

    def state(self, job: str) -> str:
        """Returns the state of a job, as PENDING or COMPLETED."""
        output = self.run("scontrol", "--oneliner", "show", "job", job)
        return next((word.removeprefix("JobState=") for word in output.split() if word.startswith("JobState=")), output)

    def wait(self, job: str, *states: str) -> str:
        """Returns the state of a job once it is one of these."""
        self._wait(lambda: self.state(job) in states, f"job {job}")
        return self.state(job)

    def _wait(self, condition: Callable[[], bool], awaited: str) -> None:
        deadline = time.monotonic() + LONGEST / 3
        while not condition():
            logs = {path.name: path.read_text()[-3000:] for path in self.directory.glob("*.log")}
            assert time.monotonic() < deadline, f"{awaited} is not there: {logs}"
            time.sleep(0.5)
