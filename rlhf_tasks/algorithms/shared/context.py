"""The third argument of a call's function, after its engine and its samples, and its result."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_tasks.config.base import RunConfig
from rlhf_tasks.parallel.batch.samples import SampleBatch

if TYPE_CHECKING:
    from rlhf_tasks.data.tokenizer import Tokenizer
    from rlhf_tasks.parallel.train.engine import Engine
    from rlhf_tasks.rewards.process import RewardProcess


@dataclass(frozen=True, slots=True)
class CallContext:
    """One execution of one call.

    iteration      counted from 0
    first_sample   global id of the iteration's first sample; its ids are the `n_seqs` integers from there
    n_seqs         sequences of the iteration
    micro_batches  micro-batches into which this dp rank's share of one (mini-)batch is cut
    rewards        this rank's helper process for Python rewards
    run_folder     on a disk that all hosts share; samples are written there
    where          global id of a sample -> `file:line` of its row
    columns        gives the names of all columns of the data, whichever this rank's rows have
    """

    config: RunConfig
    iteration: int
    first_sample: int
    n_seqs: int
    micro_batches: int
    tokenizer: "Tokenizer"
    rewards: "RewardProcess"
    run_folder: Path
    where: Callable[[int], str]
    columns: Callable[[], Sequence[str]]


@dataclass(frozen=True, slots=True)
class CallOutput:
    """The result of a call.

    batch    new keys of this dp rank's samples, on the data-parallel head; None elsewhere, or without new keys
    metrics  global values, equal on every rank of the mesh
    """

    batch: SampleBatch | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


CallFunction = Callable[["Engine", SampleBatch, CallContext], CallOutput]
