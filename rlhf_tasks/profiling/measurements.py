"""What a profile is made of: the figures that ranks measure and the planner reads. Torch-free."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from rlhf_tasks.spec import Frozen

Pass = Literal["forward", "backward", "prefill", "decode"]
"""What a layer or the model's ends do: inference's forward pass; what training adds to it; a prompt's pass, the
weights' packing included; one decoding step."""

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
]
"""`lm` and `scalar` are the heads: all of a micro-batch's work besides embedding and layers."""

Exchange = Literal["all_reduce", "all_gather", "reduce_scatter", "send", "share", "redistribute"]
"""`send`: one message between two stages; `share`: a batch from its head to the replica; `redistribute`: samples from
one head to another, with what heads tell each other."""


LEAST_S, MOST_S, MOST_BYTES = 1e-12, 1e6, 2**60
"""Nothing that is measured takes less or more seconds, or is of more bytes: figures beyond are errors."""


class Timed(Frozen):
    """Seconds of an operation on one model under tensor parallelism of degree tp, its sums over tp included.

    tokens   of the micro-batch; of a decoding step: sequences; of the optimizer: parameters of the device
    context  length of the sequences in tokens; while decoding, of their KV cache; of ends and optimizer 0 where it
             does not matter
    """

    operation: Operation
    tp: int
    tokens: int
    context: int
    seconds: float


class TimedExchange(Frozen):
    """Seconds of a collective or message of size_bytes (in all; of a share, a batch's data) among some ranks."""

    kind: Exchange
    ranks: int
    crosses_hosts: bool
    size_bytes: int
    seconds: float


class Measurements(Frozen):
    """What one rank measured of one model.

    process_bytes  anonymous memory of the rank's process besides tensors
    """

    operations: tuple[Timed, ...] = ()
    exchanges: tuple[TimedExchange, ...] = ()
    process_bytes: int = 0


class Grid(NamedTuple):
    """Where to measure: powers of two that enclose the work of a run.

    tokens   of a micro-batch; lengths of its sequences
    rows     sequences that decode in step; contexts: lengths of their prompts
    """

    tokens: tuple[int, ...]
    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    contexts: tuple[int, ...]

    @staticmethod
    def around(n_seqs: int, prompt_tokens: int, total_tokens: int, context: int) -> "Grid":
        """For batches of up to n_seqs sequences with prompts and whole sequences of these lengths.

        context  the longest sequence that the model can bear
        """
        tokens = min(n_seqs * total_tokens, MOST_TOKENS)
        longest = min(total_tokens, context)
        return Grid(
            tokens=_powers(max(tokens // 64, 16), tokens),
            lengths=_powers(max(longest // 2, 1), longest, at_most=context),
            rows=_powers(1, min(n_seqs, MOST_ROWS)),
            contexts=_powers(min(prompt_tokens, longest // 2), longest // 2),
        )


MOST_TOKENS, MOST_ROWS = 8192, 256  # beyond, seconds grow linearly: devices are busy


def _powers(low: int, high: int, at_most: int | None = None) -> tuple[int, ...]:
    """Powers of two from the last one up to `low` to the first one from `high` on, bounded by `at_most`."""

    def all_of() -> Iterator[int]:
        power = 1 << (max(low, 1).bit_length() - 1)
        while True:
            yield power if at_most is None else min(power, at_most)
            if power >= high:
                return
            power *= 2

    return tuple(dict.fromkeys(all_of()))
