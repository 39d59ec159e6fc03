"""Samples that leave the batch of an iteration: nothing that follows sees them."""

from torch import Tensor

from rlhf_tasks.algorithms.shared.graphs.rollout_calls import STAYS
from rlhf_tasks.parallel.batch.samples import SampleBatch


def without_skipped(batch: SampleBatch, key: str = STAYS) -> SampleBatch:
    """The samples on which no reward failed; all where the run would have ended otherwise."""
    return staying(batch, batch[key].values) if key in batch.data else batch


def staying(batch: SampleBatch, stays: Tensor) -> SampleBatch:
    """The samples of a batch that stay. stays  [n] bool"""
    return batch if bool(stays.all()) else batch.take(stays.nonzero().squeeze(1).tolist())
