"""Responses of several turns: what generation says of them, and is answered (docs/adr/0042-turns-apart.md)."""

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class Following(NamedTuple):
    """What follows a turn of a sample.

    ids     tokens that are read before the next turn
    most    tokens of the next turn; 0: the response is over, and nothing is read
    number  of the sample whose random numbers the turn has; None: its own
    anew    whether another sequence begins here: all before is forgotten. The prompt must be empty
    """

    sample: int
    ids: Sequence[int] = ()
    most: int = 0
    number: int | None = None
    anew: bool = False


class Turn(NamedTuple):
    """A turn that was drawn. What has tensors is good until the call that it is given to returns.

    ids         its tokens
    is_cut      neither a stop id nor a stop string has ended it
    logprobs    [n] float of its tokens
    candidates  where recorded, which tokens could be drawn: as `kept_counts` and `kept_tokens` of `generate`
    """

    ids: Sequence[int]
    is_cut: bool
    logprobs: Tensor
    candidates: tuple[Tensor, Tensor] | None


class Partners(Protocol):
    """Those with whom the sequences of a head talk: environments, agents. All methods return soon but `answered`."""

    def begun(self, sample: int, read: int) -> None:
        """A turn is drawn from now on, or drawn on after it had to leave. read: tokens that were read for it, but for
        the one that its first step reads"""
        ...

    def ended(self, sample: int, turn: Turn) -> None:
        """A turn has ended."""
        ...

    def answered(self, samples: Collection[int], wait_s: float) -> list[Following]:
        """What follows those of these samples that have been answered since. Where nobody has been, of all that wait,
        it waits for the first of them, for so many seconds at most. It is called at every check while any wait, for
        no samples too, so that what is sent to partners and comes from them moves. Raises what ends the run."""
        ...


class Turns(NamedTuple):
    """Responses are drawn turn by turn.

    most      tokens of the first turn of each
    partners  on the head; None elsewhere
    together  all continue when all have been answered and nobody is drawn, so who was faster decides nothing, not
              even how batches round
    """

    most: int
    partners: Partners | None
    together: bool = False
