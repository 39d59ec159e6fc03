"""Parallel strategies and placements: which device holds which (dp, tp, pp, cp) coordinate. Pure Python.

We say *axis* for dp, tp, pp, cp and *dim* for a tensor's dimension. The rank order inside a placement is
pp-major, then dp, then cp, then tp, so that a tensor-parallel group consists of neighbouring devices:

    devices[((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank]

The ranks of a cp group (context parallelism) divide the tokens of the same samples. They hold the same parameters, so
to these a cp rank is what a dp rank is; to samples it is what a tp rank is.
"""

from dataclasses import dataclass
from typing import Literal

Shard = Literal["gradients", "parameters"]
"""What is cut over dp besides the optimizer's state: gradients (ZeRO stage 2), or the weights too (stage 3)."""

MAX_DEVICES = 131_072
"""Most devices of a cluster: eight times the largest that planning is tested with. A larger number is a typing
error."""


def check_count(n_hosts: int, devices_per_host: int) -> None:
    """Raises ValueError for more devices than MAX_DEVICES."""
    if n_hosts * devices_per_host > MAX_DEVICES:
        raise ValueError(
            f"n_hosts={n_hosts} x devices_per_host={devices_per_host} are {n_hosts * devices_per_host} devices; "
            f"clusters of up to {MAX_DEVICES} can be planned. Lower n_hosts or devices_per_host."
        )


@dataclass(frozen=True, slots=True, order=True)
class ParallelStrategy:
    """Degrees of data, tensor, pipeline and context parallelism, always in this order.

    shard  with "parameters" each dp and cp rank holds an equal share of the weights, frozen ones too, and gathers
           those of a layer when it needs them
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    shard: Shard = "gradients"

    def __post_init__(self) -> None:
        for axis in ("dp", "tp", "pp", "cp"):
            degree = getattr(self, axis)
            if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
                raise ValueError(f"{axis}={degree!r} is not a positive whole number.")
        if self.shard == "parameters" and self.pp > 1:
            raise ValueError(
                f"sharded weights with pp={self.pp}: each stage would gather its layers anew for every micro-batch. "
                "Choose pp=1 with a larger dp or tp, or leave out sharded."
            )
        if self.shard == "parameters" and self.copies == 1:
            raise ValueError(
                "sharded weights are cut over dp, and dp is 1. Choose a larger dp, or leave out sharded."
            )

    @property
    def weight_shares(self) -> int:
        """Number of dp and cp ranks over which the weights are cut; 1 where each holds whole slices."""
        return self.copies if self.shard == "parameters" else 1

    @property
    def size(self) -> int:
        """Number of devices the strategy needs."""
        return self.copies * self.tp * self.pp

    @property
    def copies(self) -> int:
        """Number of devices that hold the same slices of the parameters: those of all dp and cp ranks."""
        return self.dp * self.cp

    def __str__(self) -> str:
        of_context = f" cp={self.cp}" if self.cp > 1 else ""
        of_shares = " sharded" if self.weight_shares > 1 else ""
        return f"dp={self.dp} tp={self.tp} pp={self.pp}{of_context}{of_shares}"


@dataclass(frozen=True, slots=True, order=True)
class Coordinate:
    """A device's position on the axes of one placement."""

    dp: int
    tp: int
    pp: int
    cp: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Device ids (positions in the cluster, from 0) in order, together with the parallel strategy.

    Raises ValueError when the number of devices differs from the strategy's size or a device repeats.
    """

    devices: tuple[int, ...]
    strategy: ParallelStrategy

    def __post_init__(self) -> None:
        if len(self.devices) != self.strategy.size:
            raise ValueError(
                f"strategy {self.strategy} needs {self.strategy.size} devices; "
                f"the mesh has {len(self.devices)}: {list(self.devices)}. "
                "Choose a strategy whose product equals the size of the mesh."
            )
        if len(set(self.devices)) != len(self.devices):
            raise ValueError(f"mesh {list(self.devices)} names a device twice.")

    def device(self, dp_rank: int, tp_rank: int, pp_rank: int, cp_rank: int = 0) -> int:
        s = self.strategy
        return self.devices[((pp_rank * s.dp + dp_rank) * s.cp + cp_rank) * s.tp + tp_rank]

    def coordinate(self, device: int) -> Coordinate:
        """The coordinate of a device. Raises ValueError when the device is not in the mesh."""
        return self.coordinate_at(self.devices.index(device))

    def coordinate_at(self, index: int) -> Coordinate:
        """The coordinate of the device at a place in the rank order."""
        s = self.strategy
        copies, tp_rank = divmod(index, s.tp)
        replicas, cp_rank = divmod(copies, s.cp)
        return Coordinate(dp=replicas % s.dp, tp=tp_rank, pp=replicas // s.dp, cp=cp_rank)

    def tp_group(self, device: int) -> tuple[int, ...]:
        """Devices that differ from this one only in tp rank, in rank order."""
        c = self.coordinate(device)
        return tuple(self.device(c.dp, tp_rank, c.pp, c.cp) for tp_rank in range(self.strategy.tp))

    def cp_group(self, device: int) -> tuple[int, ...]:
        """Devices that differ from this one only in cp rank, in rank order."""
        c = self.coordinate(device)
        return tuple(self.device(c.dp, c.tp, c.pp, cp_rank) for cp_rank in range(self.strategy.cp))

    def dp_group(self, device: int) -> tuple[int, ...]:
        """Devices that hold the same slices of the parameters: they differ from this one only in dp or cp rank. In
        rank order."""
        c, s = self.coordinate(device), self.strategy
        stage = s.copies * s.tp
        return self.devices[c.pp * stage + c.tp : (c.pp + 1) * stage : s.tp]

    def pp_group(self, device: int) -> tuple[int, ...]:
        """Devices that differ from this one only in pipeline stage, first stage first."""
        c = self.coordinate(device)
        return tuple(self.device(c.dp, c.tp, pp_rank, c.cp) for pp_rank in range(self.strategy.pp))

    def replica(self, dp_rank: int) -> tuple[int, ...]:
        """All devices of one data-parallel rank (cp x tp x pp of them), which compute the same samples."""
        s = self.strategy
        return tuple(
            self.device(dp_rank, t, p, c) for p in range(s.pp) for c in range(s.cp) for t in range(s.tp)
        )

    def head(self, dp_rank: int) -> int:
        """The data-parallel head, which holds a dp rank's samples: cp and tp rank 0 of the last stage."""
        return self.device(dp_rank, 0, self.strategy.pp - 1)

    @property
    def heads(self) -> tuple[int, ...]:
        """The data-parallel heads in dp order."""
        return tuple(self.head(dp_rank) for dp_rank in range(self.strategy.dp))

    def __str__(self) -> str:
        return f"[{','.join(map(str, self.devices))}] {self.strategy}"
