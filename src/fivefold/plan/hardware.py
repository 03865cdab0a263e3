"""GPUs of a run and the links between them: which ranks of a layout share a node. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.config.gpus import GPUS
from fivefold.errors import UserError, shown

HEADROOM = 0.92
"""Share of a GPU's memory that a run may fill by the estimate, which is within 8 % of measured memory."""
NETWORK_GB_S = 50.0
"""GB/s of each GPU's own network port to other nodes, in one direction: 400 Gbit/s."""
NETWORK_SHARE = 0.8
"""Share of that rate that large messages reach; an assumption, because none of our runs used several nodes."""


@dataclass(frozen=True)
class Cluster:
    """Equal nodes with equal GPUs; raises ValueError if the numbers do not fit."""

    gpu: str
    """Name in the table of GPUs."""
    gpus: int
    node_gpus: int = 8
    network_gb_s: float = NETWORK_GB_S
    price: float | None = None
    """Price of one GPU per hour."""

    def __post_init__(self) -> None:
        if self.gpu not in GPUS:
            raise UserError(f"unknown GPU {shown(self.gpu)}: known are {', '.join(GPUS)}")
        if self.gpus > self.node_gpus and self.gpus % self.node_gpus:
            raise UserError(
                f"GPUs must fill their nodes: got {self.gpus} with {self.node_gpus} on a node; "
                f"take {self.gpus // self.node_gpus * self.node_gpus} or {-(-self.gpus // self.node_gpus) * self.node_gpus}"
            )

    @property
    def bytes(self) -> int:
        """Return the memory of one GPU."""
        return int(GPUS[self.gpu].memory_gib * 2**30)

    @property
    def room(self) -> float:
        """Return the bytes of a GPU that a run may fill by the estimate."""
        return HEADROOM * self.bytes

    def together(self, size: int, stride: int) -> int:
        """Return how many of `size` ranks, one every `stride` ranks, share a node."""
        if size * stride <= self.node_gpus:
            return size
        return max(1, min(size, self.node_gpus // stride))

    @property
    def network(self) -> float:
        """Return bytes per second from one GPU to other nodes."""
        return self.network_gb_s * 1e9 * NETWORK_SHARE
