"""The figures of a profile, which ranks measure and the planner reads, and the run that measures them: one like any
other, but the nodes of its plan measure. Torch-free."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.protocol.messages import RunSpec
from prefect_rlhf.rlhf_tasks.spec import (
    CallAssignment,
    CallNode,
    ExecutionPlan,
    Frozen,
    ModelFunctionCall,
    RolePlacements,
)
from prefect_rlhf.rlhf_tasks.system.durable import ByteCount

Pass = Literal["forward", "backward", "prefill", "decode"]
"""A pass of a layer or of the model's ends: inference's forward pass; the additional time of a training step; the
prefill of prompts, including the packing of weights; one decoding step."""

Operation = Literal[
    "layer/forward",
    "layer/backward",
    "layer/prefill",
    "layer/decode",
    "lm/forward",
    "lm/backward",
    "lm/prefill",
    "lm/decode",
    "scalar/forward",
    "scalar/backward",
    "embedding/forward",
    "embedding/backward",
    "optimizer",
    "reallocation",
    "transfer",
]
"""`lm` and `scalar` are the heads: everything that a call does besides its layers."""

Exchange = Literal["all_reduce", "all_gather", "reduce_scatter", "send", "share", "redistribute"]
"""`send`: one message between two stages; `share`: a batch broadcast from its head to the replica; `redistribute`:
samples from one head to another, including the exchange of which samples each head holds."""


LEAST_S, MOST_S, MOST_BYTES = 1e-12, 1e6, 2**60
"""Bounds of measured seconds and bytes. Figures outside them are errors."""


class Timed(Frozen):
    """Seconds of an operation on one model under tensor parallelism of degree tp, including its all-reduces over tp.

    tokens   tokens of the micro-batch; for a decoding step sequences; for the optimizer parameters of the device;
             for a reallocation parameters that one device sends to another; for a transfer samples x keys, each of
             4 bytes
    context  length of the sequences in tokens; while decoding, of their KV cache; for a reallocation the model's
             layers; 0 where it does not matter
    """

    operation: Operation
    tp: int
    tokens: int
    context: int
    seconds: float


class TimedExchange(Frozen):
    """Seconds of a collective or message of size_bytes in all (for a share, the batch's data) among some ranks."""

    kind: Exchange
    ranks: int
    crosses_hosts: bool
    size_bytes: int
    seconds: float


class Measurements(Frozen):
    """One rank's figures of one piece (see `Piece`).

    process_bytes  anonymous memory of the rank's process without tensors
    threads        that the rank computes with on a CPU; 0: unknown
    """

    operations: tuple[Timed, ...] = ()
    exchanges: tuple[TimedExchange, ...] = ()
    process_bytes: int = 0
    threads: int = 0


class Grid(NamedTuple):
    """The sizes at which to measure: powers of two that enclose the sizes of a run, or a few of these.

    Seconds are about linear in tokens and rows, so points may be far apart, those of rows 16 times: a decoding step
    of few sequences takes as long as that of one, and what lies between is nearer to a line than two measurements are
    to each other.

    tokens    tokens of a micro-batch
    lengths   tokens of each of its sequences
    rows      sequences that are decoded together
    contexts  tokens of each of their prompts
    """

    tokens: tuple[int, ...]
    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    contexts: tuple[int, ...]

    @staticmethod
    def around(n_seqs: int, prompt_tokens: int, total_tokens: int, context: int) -> "Grid":
        """The grid for batches of up to n_seqs sequences.

        prompt_tokens, total_tokens  tokens of a prompt and of a whole sequence
        context                      tokens of the longest sequence that the model takes
        """
        tokens = min(n_seqs * total_tokens, MOST_TOKENS)
        longest = min(total_tokens, context)
        return Grid(
            tokens=_powers(max(tokens // 64, 16), tokens, step=4),
            lengths=_powers(max(longest // 2, 1), longest, step=4, at_most=context),
            rows=_powers(1, min(n_seqs, MOST_ROWS), step=16),
            contexts=_apart(_powers(min(prompt_tokens, longest // 2), longest // 2, step=2)),
        )


def _apart(points: tuple[int, ...]) -> tuple[int, ...]:
    """Points without the first of two that are a factor of two apart: measurements differ by more."""
    return points[1:] if len(points) == 2 and points[1] <= 2 * points[0] else points


MOST_TOKENS, MOST_ROWS = 8192, 256  # above, devices are fully used and seconds grow linearly


def _powers(low: int, high: int, step: int, at_most: int | None = None) -> tuple[int, ...]:
    """Powers of two, `step` times apart, from the largest <= `low` to the smallest >= `high`, each bounded by
    `at_most`. Both ends are among them."""

    def all_of() -> Iterator[int]:
        power, last = 1 << (max(low, 1).bit_length() - 1), 1 << (max(high, 1) - 1).bit_length()
        while True:
            yield power if at_most is None else min(power, at_most)
            if power >= last:
                return
            power = min(step * power, last)

    return tuple(dict.fromkeys(all_of()))


IDLE_NODES = 8
"""Nodes without work at the plan's end: the gaps between them are the cost of dispatching a node."""


BUDGET_S = 150.0  # seconds of the works of all models under all tp degrees; few points may take longer


class ProfilePart(Frozen):
    """One node's work: a model under one tp degree, all exchanges, or nothing (to measure dispatch).

    budget_s  seconds after which it is measured no further
    """

    kind: Literal["model", "exchanges", "idle"]
    folder: str = ""
    tp: int = 1
    grid: Grid | None = None
    budget_s: float = BUDGET_S


class ProfileSpec(Frozen):
    """The configuration of a profile run's executor.

    dtype   of the parameters, as in run configurations
    pieces  node -> its work
    """

    dtype: str
    devices_per_host: int
    pieces: dict[str, ProfilePart]


def pieces_of(folders: dict[str, Grid], n_devices: int, devices_per_host: int) -> dict[str, ProfilePart]:
    """The pieces of a profile: every model folder under each tp degree that divides a host, then exchanges.

    The exchanges come last, so that the process's memory after them includes every library that it loads.
    """
    pieces = {}
    tps = [tp for tp in range(1, devices_per_host + 1) if devices_per_host % tp == 0 and n_devices % tp == 0]
    budget_s = BUDGET_S / max(1, len(folders) * len(tps))
    for number, (folder, grid) in enumerate(folders.items()):
        for tp in tps:
            name = f"model_{number}_tp{tp}"
            pieces[name] = ProfilePart(kind="model", folder=folder, tp=tp, grid=grid, budget_s=budget_s)
    pieces["exchanges"] = ProfilePart(kind="exchanges")
    return pieces | {f"idle_{number}": ProfilePart(kind="idle") for number in range(IDLE_NODES)}


def profile_plan(pieces: dict[str, ProfilePart], n_devices: int, devices_per_host: int) -> ExecutionPlan:
    """The plan of a profile run, of one iteration: the pieces one after the other, each on all devices."""
    placement = Placement(tuple(range(n_devices)), ParallelStrategy(dp=n_devices))
    names = list(pieces)
    nodes = tuple(
        CallNode(
            name=name,
            call=ModelFunctionCall(name=name, role="profiled", kind="inference", inputs=(), n_seqs=1),
            assignment=CallAssignment(placement=placement),
            after=(names[i - 1],) if i else (),
        )
        for i, name in enumerate(names)
    )
    return ExecutionPlan(
        algorithm="profile",
        n_devices=n_devices,
        devices_per_host=devices_per_host,
        n_seqs=1,
        roles={"profiled": RolePlacements(trained=False, placements=(placement,))},
        nodes=nodes,
    )


class NoSnapshots:
    """A profile run commits nothing."""

    def __init__(self, spec: RunSpec) -> None:
        self.moved = ByteCount()

    def latest(self) -> None:
        """None: there is never a commit to resume from."""

    def commit(self, order: object, results: object) -> None:
        """Write nothing: the figures are in the results of the nodes."""

    def prune(self) -> None:
        """Remove nothing."""
