"""The dataset keys of samples, by their global ids: what the heads of a graph's first call store."""

from collections.abc import Sequence

import torch

from rlhf_tasks.algorithms.examples import read_examples
from rlhf_tasks.algorithms.registry import Algorithm, DatasetValue
from rlhf_tasks.config.base import RunConfig
from rlhf_tasks.data.dataset import Rows
from rlhf_tasks.data.tokenizer import Tokenizer
from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch


def fetch(
    algorithm: Algorithm, rows: Rows, tokenizer: Tokenizer, config: RunConfig, ids: Sequence[int]
) -> SampleBatch:
    """The algorithm's `dataset_keys`. ids: at least one."""
    indexes = [config.row_of(rows, sample) for sample in ids]
    examples = read_examples(algorithm.read_row, rows, indexes, tokenizer)
    values = [algorithm.values(example) for example in examples]
    keys = algorithm.dataset_keys
    return SampleBatch(tuple(ids), {key: _packed([each[key] for each in values]) for key in keys})


def _packed(values: Sequence[DatasetValue]) -> Packed:
    """Token ids as int64, masks as bool, text as UTF-8 bytes."""
    if isinstance(values[0], str):
        return Packed.of_texts(str(value) for value in values)
    dtype = torch.bool if any(isinstance(part, bool) for value in values for part in value) else torch.int64
    return Packed.of([torch.tensor(value, dtype=dtype) for value in values])
