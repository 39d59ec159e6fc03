"""Parallel strategies and placements: which device holds which (dp, tp, pp) coordinate. Pure Python.

We say *axis* for dp, tp, pp and *dim* for a tensor's dimension. The rank order inside a placement is
pp-major, then dp, then tp, so that a tensor-parallel group consists of neighbouring devices:

    devices[(pp_rank * dp + dp_rank) * tp + tp_rank]
"""

from dataclasses import dataclass

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
    """Degrees of data, tensor and pipeline parallelism, always in this order."""

    dp: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for axis in ("dp", "tp", "pp"):
            degree = getattr(self, axis)
            if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
                raise ValueError(f"{axis}={degree!r} is not a positive whole number.")

    @property
    def size(self) -> int:
        """Number of devices the strategy needs."""
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        return f"dp={self.dp} tp={self.tp} pp={self.pp}"


@dataclass(frozen=True, slots=True, order=True)
class Coordinate:
    """A device's position on the three axes of one placement."""

    dp: int
    tp: int
    pp: int


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

    def device(self, dp_rank: int, tp_rank: int, pp_rank: int) -> int:
        s = self.strategy
        return self.devices[(pp_rank * s.dp + dp_rank) * s.tp + tp_rank]

    def coordinate(self, device: int) -> Coordinate:
        """The coordinate of a device. Raises ValueError when the device is not in the mesh."""
        index = self.devices.index(device)
        s = self.strategy
        return Coordinate(dp=index // s.tp % s.dp, tp=index % s.tp, pp=index // (s.tp * s.dp))

    def tp_group(self, device: int) -> tuple[int, ...]:
        """Devices that differ from this one only in tp rank, in rank order."""
        c = self.coordinate(device)
        return tuple(self.device(c.dp, tp_rank, c.pp) for tp_rank in range(self.strategy.tp))

    def dp_group(self, device: int) -> tuple[int, ...]:
        """Devices that differ from this one only in dp rank, in rank order."""
        c = self.coordinate(device)
        return tuple(self.device(dp_rank, c.tp, c.pp) for dp_rank in range(self.strategy.dp))

    def pp_group(self, device: int) -> tuple[int, ...]:
        """Devices that differ from this one only in pipeline stage, first stage first."""
        c = self.coordinate(device)
        return tuple(self.device(c.dp, c.tp, pp_rank) for pp_rank in range(self.strategy.pp))

    def replica(self, dp_rank: int) -> tuple[int, ...]:
        """All devices of one data-parallel rank (tp x pp of them): one whole copy of the model."""
        s = self.strategy
        return tuple(self.device(dp_rank, t, p) for p in range(s.pp) for t in range(s.tp))

    def head(self, dp_rank: int) -> int:
        """The data-parallel head, which holds a dp rank's samples: tp rank 0 of the last stage."""
        return self.device(dp_rank, 0, self.strategy.pp - 1)

    @property
    def heads(self) -> tuple[int, ...]:
        """The data-parallel heads in dp order."""
        return tuple(self.head(dp_rank) for dp_rank in range(self.strategy.dp))

    def __str__(self) -> str:
        return f"[{','.join(map(str, self.devices))}] {self.strategy}"
