"""Two hosts on this machine, joined by a cable: names, addresses, processes and mounts of their own, in Linux namespaces.

The cable is a thread that carries packets between two TUN devices. It can be cut, and be slow and lossy, on every kernel
that has TUN: `tc netem` does the same where the kernel has it.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest

from tests.support.commands import LONGEST

NAMES, ADDRESSES = ("north", "south"), ("10.77.0.1", "10.77.0.2")
_TUN = Path("/dev/net/tun")
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_LARGEST, _USUAL = 60_000, 1_500
"""Bytes of a packet: few large ones where speed is not the question."""
_PROGRAMS = ("unshare", "nsenter", "ip")
_LOCAL = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def skip_without_hosts() -> None:
    """Skip the tests of the caller, with the reason, where this machine cannot have such hosts."""
    if os.geteuid() != 0:
        pytest.skip("two hosts are made of network namespaces, which needs root: run `make test-hosts` as root")
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"two hosts need {', '.join(missing)}: apt-get install iproute2 util-linux")
    if not _TUN.exists():
        pytest.skip(f"the cable between two hosts needs {_TUN}: modprobe tun")


def skip_without(program: str, packages: str) -> None:
    """Skip the calling test where a program is missing, with the line that installs it."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is missing: apt-get install --no-install-recommends {packages}")


class Cable:
    """Carries packets between two devices: at once, later, or not at all."""

    def __init__(self, devices: Sequence[int], delay: float, loss: float) -> None:
        """`devices`: the files of both; `delay`: seconds in one direction; `loss`: share of packets that never arrive."""
        self.is_cut = False
        self.carried = 0
        """Packets that arrived."""
        self._devices, self._delay, self._loss = devices, delay, loss
        self._ends, self._random = False, random.Random(0)
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def _carry(self) -> None:
        under_way: list[tuple[float, int, int, bytes]] = []
        other = dict(zip(self._devices, reversed(self._devices), strict=True))
        alive = list(self._devices)
        for number in count():
            if self._ends:
                return
            wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else 0.2
            for device in select.select(alive, [], [], min(wait, 0.2))[0]:
                try:
                    packet = os.read(device, 1 << 16)
                except OSError:
                    # The host, and its device with it, is gone.
                    alive.remove(device)
                    continue
                if not self.is_cut and self._random.random() >= self._loss:
                    heapq.heappush(under_way, (time.monotonic() + self._delay, number, other[device], packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, device, packet = heapq.heappop(under_way)
                if not self.is_cut:
                    self._deliver(device, packet)

    def _deliver(self, device: int, packet: bytes) -> None:
        try:
            os.write(device, packet)
            self.carried += 1
        except OSError:
            # The host, and its device with it, is gone.
            pass

    def close(self) -> None:
        self._ends = True
        self._thread.join()
        for device in self._devices:
            os.close(device)


class Host:
    """A host of its own name, address, processes and temporary directory."""

    def __init__(self, name: str, address: str, hosts_file: Path) -> None:
        self.name, self.address = name, address
        self.temporary = Path(tempfile.mkdtemp(prefix=f"{name}-", dir="/tmp"))
        # Its first process reads a pipe of this one: where this process ends, in whatever way, the host ends too.
        # Without a file of name servers, none of which a host reaches: a name that is in no file is looked up in vain at once.
        mounts = (
            f"mount --bind {hosts_file} /etc/hosts && mount --bind /dev/null /etc/resolv.conf && mount -t tmpfs tmpfs /run"
        )
        begin = f"hostname {name} && {mounts} && ip link set lo up && echo up && cat"
        words = ["unshare", "--net", "--uts", "--mount", "--pid", "--ipc", "--fork", "--mount-proc", "sh", "-c", begin]
        self._holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "up\n", "the host does not start"
        (first,) = psutil.Process(self._holder.pid).children()
        self._first, self._pids = first, _pids_of(first.pid)
        self.enter = ["nsenter", "--target", str(first.pid), "--net", "--uts", "--mount", "--pid", "--ipc", "--"]
        self.started: list[Program] = []

    def plug(self, mtu: int) -> int:
        """Gives this host a network device with its address; returns the file of the device's other side."""
        device, interface = os.open(_TUN, os.O_RDWR | os.O_CLOEXEC), f"t{os.getpid() % 10**6}{self.name}"[:15]
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22s", interface.encode(), _IFF_TUN | _IFF_NO_PI, b""))
        subprocess.run(["ip", "link", "set", interface, "netns", str(self._first.pid), "name", "eth0"], check=True)
        for words in (f"addr add {self.address}/24 dev eth0", f"link set eth0 mtu {mtu} up"):
            subprocess.run([*self.enter, "ip", *words.split()], check=True)
        return device

    def start(self, *command: object, env: Mapping[str, str] = MappingProxyType({}), cwd: Path | None = None) -> Program:
        """Start a program here; its output goes into a file."""
        inherited = {name: value for name, value in os.environ.items() if name not in _LOCAL}
        variables = {**inherited, "TMPDIR": str(self.temporary), "PYTHONPATH": os.pathsep.join(sys.path), **env}
        program = Program([*self.enter, *map(str, command)], variables, cwd)
        self.started.append(program)
        return program

    def run(self, *command: object, env: Mapping[str, str] = MappingProxyType({})) -> str:
        """Returns what a program said that ended well."""
        program = self.start(*command, env=env)
        assert program.wait() == 0, program.output
        return program.output

    def processes(self) -> list[psutil.Process]:
        """Returns all processes of this host."""
        return [process for process in psutil.process_iter() if _pids_of(process.pid) == self._pids]

    def kill(self) -> None:
        """End all processes of this host at once."""
        self._holder.kill()
        if self._first.is_running():
            self._first.kill()
        self._holder.wait()

    def close(self) -> None:
        self.kill()
        for program in self.started:
            program.close()
        shutil.rmtree(self.temporary, ignore_errors=True)


def _pids_of(pid: int) -> str:
    """Returns the namespace of a process's number; empty if the process has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


class Program:
    """A program on a host; what `wait_for` needs, and what it said on both streams."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], cwd: Path | None) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            words, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=self._file, stderr=self._file,
            start_new_session=True,
        )  # fmt: skip

    def poll(self) -> int | None:
        return self._process.poll()

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def communicate(self) -> str:
        return self.output

    @property
    def output(self) -> str:
        return os.pread(self._file.fileno(), 1 << 24, 0).decode(errors="replace")

    def wait(self, seconds: float = LONGEST) -> int:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it runs after {seconds} s: {self.output}") from None

    def tree(self) -> list[psutil.Process]:
        """Returns the program and all that it started."""
        return psutil.Process(self._process.pid).children(recursive=True)

    def send_signal(self, number: int) -> None:
        """Send a signal to the program itself, the child of the one that entered the host."""
        for child in psutil.Process(self._process.pid).children():
            child.send_signal(number)

    def close(self) -> None:
        self._process.wait()
        self._file.close()


@dataclass
class Hosts:
    """Two hosts and the cable between them."""

    north: Host
    south: Host
    cable: Cable

    def __iter__(self) -> Iterator[Host]:
        return iter((self.north, self.south))

    def lose(self, host: Host) -> None:
        """Take the power from a host: nothing says goodbye on its behalf."""
        self.cable.is_cut = True
        host.kill()


@contextmanager
def two_hosts(delay: float = 0.0, loss: float = 0.0) -> Iterator[Hosts]:
    """Makes two hosts; they, and everything on them, end with this context."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-")))
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in zip(NAMES, ADDRESSES, strict=True))]
        (directory / "hosts").write_text("\n".join(lines) + "\n")
        hosts = []
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            hosts.append(Host(name, address, directory / "hosts"))
            stack.callback(hosts[-1].close)
        cable = Cable([host.plug(_USUAL if delay or loss else _LARGEST) for host in hosts], delay, loss)
        stack.callback(cable.close)
        first, second = hosts
        yield Hosts(first, second, cable)
