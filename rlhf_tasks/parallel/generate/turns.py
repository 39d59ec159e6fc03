"""Responses of several turns: what generation says of them, and is answered (docs/adr/0042-turns-apart.md)."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from prefect_rlhf.rlhf_tasks.parallel.generate.sampling import StopStrings


class Following(NamedTuple):
    """What follows a turn of a sample.

    ids     tokens that are read before the next turn
    most    tokens of the next turn; 0: the response is over, and nothing is read
    number  of the sample whose random numbers the turn has; None: its own
    anew    whether another sequence begins here: all before is forgotten. The prompt must be empty
    stop    strings that end the turn; None: those of the order
    """

    sample: int
    ids: Sequence[int] = ()
    most: int = 0
    number: int | None = None
    anew: bool = False
    stop: tuple[str, ...] | None = None


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


class Listener(Protocol):
    """Who hears turns while they are drawn, on the head. Both methods return soon."""

    def listened(self) -> Mapping[int, int]:
        """The samples whose turns are heard now -> the tokens that were heard of these. Asked at every check."""
        ...

    def drawn(self, sample: int, ids: Sequence[int], logprobs: Tensor) -> None:
        """Further tokens of a turn that has not ended, and their log-probabilities [n] float."""
        ...


class Turns(NamedTuple):
    """Responses are drawn turn by turn.

    most          tokens of the first turn of each
    partners      on the head; None elsewhere
    together      all continue when all have been answered and nobody is drawn, so who was faster decides nothing, not
                  even how batches round
    listener      on the head, hears turns while they are drawn; None: nobody does
    stop_strings  makes what finds the stop strings of single turns, on all ranks; None: turns have none of their own
    """

    most: int
    partners: Partners | None
    together: bool = False
    listener: Listener | None = None
    stop_strings: Callable[[tuple[str, ...]], StopStrings] | None = None
