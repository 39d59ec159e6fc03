"""Floating-point operations of a decoder: what the planner prices passes by, and what engines count as `mfu`'s.

Two per parameter of a matrix that a token is multiplied by and four per pair of a query's column and an attended
token (scores and weighted values), as in arXiv:2104.04473, eq. 3, here with causal attention: a token of a whole
sequence attends to half of it on average. A backward pass does twice the work of a forward pass. What is computed
beside a model's own work (recomputed activations, padding, sequences that ended) does not count.
"""

from collections.abc import Iterable

from rlhf_tasks.parallel.layout.shape import Head, ModelShape, parameters

TRAINING = 3  # a forward and a backward pass, in forward passes


def layer_flops(tokens: float, attended: float, size: float, query: float) -> float:
    """A layer's forward pass over some tokens, each attending to `attended` others on average.

    size   parameters of the layer; query: width of its query heads
    """
    return 2 * tokens * size + 4 * tokens * attended * query


def head_flops(tokens: float, hidden: int, vocab: int) -> float:
    """The logits of some tokens; vocab: 1 for a scalar head."""
    return 2 * tokens * hidden * vocab


def forward_flops(shape: ModelShape, head: Head, lengths: Iterable[int]) -> float:
    """A whole model's pass over sequences of these lengths in tokens."""
    vocab = 1 if head == "scalar" else shape.vocab
    return sum(
        _layers_flops(shape, head, length) + head_flops(length, shape.hidden, vocab) for length in lengths
    )


def generation_flops(shape: ModelShape, lengths: Iterable[int], new_tokens: int) -> float:
    """Drawing responses with a KV cache: each token but the last goes through the layers once, and each new one is
    drawn from logits of its own.

    lengths     of prompt and response, sample by sample
    new_tokens  of all responses together
    """
    drawn = head_flops(new_tokens, shape.hidden, shape.vocab)
    return drawn + sum(_layers_flops(shape, "lm", length - 1) for length in lengths)


def _layers_flops(shape: ModelShape, head: Head, tokens: int) -> float:
    size = sum(spec.size for spec in parameters(shape, head) if spec.layer == 0)
    return shape.layers * layer_flops(tokens, tokens / 2, size, shape.query_heads * shape.head_dim)
