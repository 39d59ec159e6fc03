"""Floating-point operations (FLOPs) of a decoder. The planner prices passes with them, and engines count them for
`mfu`.

As in arXiv:2104.04473, eq. 3, a token costs two FLOPs per parameter of each matrix that it is multiplied by, and four
per attended token and column of the query (scores and weighted values). Attention here is causal: a token attends to
half of its sequence on average. A backward pass costs twice a forward pass. Recomputed activations, padding and
sequences that have ended do not count.
"""

from collections.abc import Iterable, Sequence

from rlhf_tasks.parallel.layout.shape import Head, ModelShape, parameters

TRAINING = 3  # cost of a forward and a backward pass, in forward passes


def layer_flops(tokens: float, attended: float, size: float, query: float) -> float:
    """FLOPs of one layer's forward pass.

    tokens    tokens that pass the layer
    attended  tokens that each of them attends to, on average
    size      parameters of the layer
    query     columns of all query heads together
    """
    return 2 * tokens * size + 4 * tokens * attended * query


def head_flops(tokens: float, hidden: int, vocab: int) -> float:
    """FLOPs of the head for some tokens; vocab: 1 for a scalar head."""
    return 2 * tokens * hidden * vocab


def forward_flops(
    shape: ModelShape, head: Head, lengths: Sequence[int], predicted: int | None = None
) -> float:
    """FLOPs of a whole model's forward pass over sequences of these lengths in tokens.

    predicted  tokens that pass the head; None: all
    """
    vocab = 1 if head == "scalar" else shape.vocab
    rows = sum(lengths) if predicted is None else predicted
    return sum(_layers_flops(shape, head, length) for length in lengths) + head_flops(
        rows, shape.hidden, vocab
    )


def generation_flops(shape: ModelShape, lengths: Iterable[int], new_tokens: int) -> float:
    """FLOPs of generation with a KV cache.

    Each token but a sequence's last passes the layers once, and each new token needs the logits of one position.

    lengths     tokens of prompt and response together, for each sample
    new_tokens  tokens of all responses together
    """
    drawn = head_flops(new_tokens, shape.hidden, shape.vocab)
    return drawn + sum(_layers_flops(shape, "lm", length - 1) for length in lengths)


def _layers_flops(shape: ModelShape, head: Head, tokens: int) -> float:
    size = sum(spec.size for spec in parameters(shape, head) if spec.layer == 0)
    return shape.layers * layer_flops(tokens, tokens / 2, size, shape.query_heads * shape.head_dim)
