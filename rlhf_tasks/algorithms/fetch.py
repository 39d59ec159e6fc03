"""The dataset keys of samples, by their global ids: what the heads of a graph's first call store."""

from collections.abc import Sequence

import numpy as np
import torch

from rlhf_tasks.config.base import RunConfig
from rlhf_tasks.data.rows import DatasetValue
from rlhf_tasks.data.token_file import StoredNumbers, TokenFile
from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch


def fetch(rows: TokenFile, config: RunConfig, ids: Sequence[int]) -> SampleBatch:
    """The values of samples under each key of the data set. ids: at least one."""
    values = [config.values_of(rows, sample) for sample in ids]
    return SampleBatch(tuple(ids), {key: _packed([each[key] for each in values]) for key in values[0]})


def _packed(values: Sequence[StoredNumbers | DatasetValue]) -> Packed:
    """Token ids as int64, masks as bool, other numbers as float64, text as UTF-8 bytes."""
    if isinstance(values[0], str):
        return Packed.of_texts(str(value) for value in values)
    dtype = {"b": np.bool_, "f": np.float64}.get(np.asarray(values[0]).dtype.kind, np.int64)
    return Packed.of([torch.from_numpy(np.asarray(value).astype(dtype)) for value in values])
