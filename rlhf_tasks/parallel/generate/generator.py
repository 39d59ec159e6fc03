"""What a run asks of whatever draws its responses, and the engine of our own behind it (docs/adr/0028)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.generate.generation import Segments, generate
from prefect_rlhf.rlhf_tasks.parallel.generate.sampling import SamplingParams
from prefect_rlhf.rlhf_tasks.parallel.generate.turns import Turns
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine


class Order(NamedTuple):
    """What is drawn besides the prompts.

    seed, iteration, purpose  together with a sample's id, they say which random numbers it has
    stop_strings   that end a response, as texts: `params.stop_strings` is a table of the same
    record_kept    also which tokens could be drawn: top-k, top-p or `min_new_tokens` leave some out
    micro_batches  parts of the batch that are decoded one after the other, where memory depends on it
    segments       how far responses are drawn now; None: to their ends
    turns          how responses are drawn turn by turn; None: at once
    on_ended       on the head, gets each sample's id and what was drawn of it as soon as it has ended, while others
                   are drawn; a generator that does not know may say so of all at the end, or never
    """

    params: SamplingParams
    seed: int
    iteration: int
    purpose: str = "rollout"
    stop_strings: tuple[str, ...] = ()
    record_kept: bool = False
    micro_batches: int = 1
    segments: Segments | None = None
    turns: Turns | None = None
    on_ended: Callable[[int, Sequence[int]], None] | None = None


class Terms(NamedTuple):
    """What a generator is made from, on each rank.

    folder       of the model that will be drawn from, as it was when the run began
    tokenizer    folder of its tokenizer
    dtype        of the weights
    tokens       only ids below are drawn; None: all
    most_tokens  of a sequence
    patience     factor of all waits
    settings     the section `generation` of the run's configuration
    run_folder   of the run; None: it has none
    """

    folder: str
    tokenizer: str
    dtype: str
    tokens: int | None
    most_tokens: int
    patience: float
    settings: Mapping[str, Any]
    run_folder: str | None = None


class Generator(Protocol):
    """Draws responses. Each rank has one. All ranks of a replica (one dp rank) call its methods together, one after
    the other; only `abort` comes from another thread.

    version      of the weights that it draws from: the version that has drawn each token
    draws_turns  whether `draw` takes orders with turns; else turn_by_turn.py asks it for one turn after the other
    """

    version: int
    draws_turns: bool

    def take(self, engine: Engine) -> None:
        """Draw from an engine's weights, of its `version`, from now on. Nothing that was computed with other weights
        may be used after. Raises an error where the weights that arrived are others."""
        ...

    def draw(self, batch: SampleBatch, order: Order) -> SampleBatch | None:
        """One response to each prompt, by the keys of `generation.generate`, on the head; None elsewhere.

        `old_logprobs` are under the distribution that was drawn from. Raises an error when this takes longer than
        its own deadline without progress: the run then begins the iteration anew, with a new generator.
        """
        ...

    def free(self) -> None:
        """Give back the memory of the device that it can do without until the next `take`."""
        ...

    def abort(self) -> None:
        """From another thread: make a method that waits raise soon. Afterwards it can only be closed."""
        ...

    def close(self) -> None:
        """End every process and free all memory."""
        ...


class BuiltIn:
    """Generation on the run's own ranks, with the engine's own weights: nothing is copied."""

    draws_turns = True

    def __init__(self, terms: Terms | None = None) -> None:
        self.version = 0
        self._engine: Engine | None = None

    def take(self, engine: Engine) -> None:
        """Draw from this engine. Its weights stay where they are."""
        self._engine, self.version = engine, engine.version

    def draw(self, batch: SampleBatch, order: Order) -> SampleBatch | None:
        """`generate`."""
        assert self._engine is not None, "draw before take"
        return generate(
            self._engine,
            batch,
            order.params,
            order.seed,
            order.iteration,
            order.purpose,
            record_kept=order.record_kept,
            micro_batches=order.micro_batches,
            segments=order.segments,
            turns=order.turns,
            on_ended=order.on_ended,
        )

    def free(self) -> None:
        """Nothing is held between two draws."""

    def abort(self) -> None:
        """Its waits are those of the engine's groups, which are aborted by themselves."""

    def close(self) -> None:
        """Nothing of its own is left."""
        self._engine = None
