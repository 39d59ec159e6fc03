"""The dataset keys of samples, by their global ids: what the heads of a graph's first call store."""

from collections.abc import Sequence

import torch

from rlhf_tasks.algorithms.configurations import AnyConfig, RolloutConfig
from rlhf_tasks.algorithms.examples import completion_example, pair_example, prompt_example, read_examples
from rlhf_tasks.data.dataset import Rows
from rlhf_tasks.data.tokenizer import Tokenizer
from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch


def row_of(rows: Rows, config: AnyConfig, sample: int) -> int:
    """The row that a sample's prompt is. A rollout reads the rows in file order, `num_generations` ids for each."""
    if isinstance(config, RolloutConfig):
        return sample // config.num_generations % len(rows)
    return rows.row_of(sample, config.seed)


def fetch_prompts(rows: Rows, tokenizer: Tokenizer, config: AnyConfig, ids: Sequence[int]) -> SampleBatch:
    """`prompt_ids` and `columns`."""
    indexes = [row_of(rows, config, sample) for sample in ids]
    examples = list(read_examples(prompt_example, rows, indexes, tokenizer))
    return SampleBatch(
        tuple(ids),
        {
            "prompt_ids": _tokens([example.prompt_ids for example in examples]),
            "columns": Packed.of_texts(example.columns for example in examples),
        },
    )


def fetch_completions(rows: Rows, tokenizer: Tokenizer, config: AnyConfig, ids: Sequence[int]) -> SampleBatch:
    """`input_ids` and `response_mask`, True on the tokens that are learned."""
    indexes = [rows.row_of(sample, config.seed) for sample in ids]
    examples = list(read_examples(completion_example, rows, indexes, tokenizer))
    masks = [torch.arange(len(example.input_ids)) >= example.prompt_tokens for example in examples]
    tokens = _tokens([example.input_ids for example in examples])
    return SampleBatch(tuple(ids), {"input_ids": tokens, "response_mask": Packed.of(masks)})


def fetch_pairs(rows: Rows, tokenizer: Tokenizer, config: AnyConfig, ids: Sequence[int]) -> SampleBatch:
    """`chosen_ids` and `rejected_ids`, each with the prompt before it."""
    indexes = [rows.row_of(sample, config.seed) for sample in ids]
    examples = list(read_examples(pair_example, rows, indexes, tokenizer))
    return SampleBatch(
        tuple(ids),
        {
            "chosen_ids": _tokens([example.chosen_ids for example in examples]),
            "rejected_ids": _tokens([example.rejected_ids for example in examples]),
        },
    )


def _tokens(sequences: list[list[int]]) -> Packed:
    return Packed.of([torch.tensor(ids, dtype=torch.int64) for ids in sequences])
