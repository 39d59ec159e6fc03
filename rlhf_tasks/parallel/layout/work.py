"""The work of a call: its floating-point operations (FLOPs), and how much of it happens at a time. The engine does
it, and counts its FLOPs for `mfu`; the planner prices it. Loads no torch.

As in arXiv:2104.04473, eq. 3, a token costs two FLOPs per parameter of each matrix that it is multiplied by, and four
per attended token and column of the query (scores and weighted values). Attention here is causal: a token attends to
half of its sequence on average. A token reads, corrects and reads again the state of a layer with the gated delta
rule: six FLOPs for each of its elements. A backward pass costs twice a forward pass. Recomputed activations, padding
and sequences that have ended do not count.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import Lora, parameters, trained_parameters
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import KV_HEADS, Head, ModelShape

TRAINING = 3  # cost of a forward and a backward pass, in forward passes


def layer_flops(tokens: float, attended: float, size: float, query: float, state: float = 0.0) -> float:
    """FLOPs of one layer's forward pass.

    tokens    tokens that pass the layer
    attended  tokens that each of them attends to, on average
    size      parameters of the layer
    query     columns of all query heads together
    state     elements of a sequence's state
    """
    return 2 * tokens * size + 4 * tokens * attended * query + 6 * tokens * state


def head_flops(tokens: float, hidden: int, vocab: int) -> float:
    """FLOPs of the head for some tokens; vocab: 1 for a scalar head."""
    return 2 * tokens * hidden * vocab


def pass_flops(
    shape: ModelShape,
    head: Head,
    lengths: Sequence[int],
    predicted: int | None = None,
    lora: Lora | None = None,
    shared: Sequence[int] = (),
    training: bool = False,
) -> float:
    """FLOPs of a whole model's forward pass, adapters included, over sequences of these lengths in tokens.

    predicted  tokens that pass the head; None: all
    shared     of some of the sequences, how many first tokens are computed with another one
    training   of a backward pass too. Under LoRA, frozen matrices have no products for their gradients
    """
    vocab = 1 if head == "scalar" else shape.vocab
    rows = sum(lengths) if predicted is None else predicted
    layers = sum(_layers_flops(shape, head, length, lora) for length in lengths)
    # What mixes tokens by a state does so for every sequence.
    layers -= sum(_layers_flops(shape, head, length, lora, states=False) for length in shared)
    forward = layers + head_flops(rows, shape.hidden, vocab)
    if not training:
        return forward
    spared = 0.0
    if lora is not None:
        spared = 2 * (sum(lengths) - sum(shared)) * layers_size(shape, head)
        if head == "lm":
            spared += head_flops(rows, shape.hidden, shape.vocab)
    return TRAINING * forward - spared


def generation_flops(
    shape: ModelShape, lengths: Iterable[int], new_tokens: int, lora: Lora | None = None
) -> float:
    """FLOPs of generation with a KV cache.

    Each token but a sequence's last passes the layers once, and each new token needs the logits of one position.

    lengths     tokens of prompt and response together, for each sample
    new_tokens  tokens of all responses together
    """
    drawn = head_flops(new_tokens, shape.hidden, shape.vocab)
    return drawn + sum(_layers_flops(shape, "lm", length - 1, lora) for length in lengths)


@lru_cache(maxsize=64)
def layers_size(shape: ModelShape, head: Head, lora: Lora | None = None) -> int:
    """Parameters of all layers that a token is multiplied by: of experts, those of the ones that it is given to.

    With `lora`, only those of its adapters.
    """
    specs = parameters(shape, head) if lora is None else trained_parameters(shape, head, lora)
    whole = [spec.size for spec in specs if spec.layer is not None and not spec.of_experts]
    of_expert = [spec.size // spec.shape[0] for spec in specs if spec.layer is not None and spec.of_experts]
    return sum(whole) + shape.experts_per_token * sum(of_expert)


def _layers_flops(
    shape: ModelShape, head: Head, tokens: int, lora: Lora | None, states: bool = True
) -> float:
    size = layers_size(shape, head) + (0 if lora is None else layers_size(shape, head, lora))
    query = shape.query_heads * shape.mean_head_dim * shape.share(*KV_HEADS)
    state = shape.delta.state * shape.share("delta") if shape.delta and states else 0.0
    return shape.layers * layer_flops(tokens, tokens / 2, size / shape.layers, query, state)


PREFILL_TOKENS = 8192
"""Most tokens of a pass over prompts: enough to keep a device busy, and its activations are small beside a model."""

REFILL_SHARE = 8
"""Waiting sequences enter once an eighth of the slots is free: a pass over a prompt takes about as long as a step."""

SAMPLED_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Logits of a rank that tokens are drawn from at a time, by type of device. Their float64 copies stay in a CPU's
cache, and small beside a model on a GPU, which sums up many rows at a time as fast as one."""

LOGITS_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Logits of a rank whose log-probabilities are computed at a time, by type of device. On a CPU their 4 MiB of float32
stay in the cache; on a GPU 64 MiB take longer to compute than their kernel to launch."""

DELTA_CHUNK = 64
"""Most tokens of a chunk of the gated delta rule. A larger one has more work inside, a smaller one more chunks that
wait for each other."""

LEAST_SHARED = 8
"""Fewest first tokens that neighbouring samples have in common and are computed once. Below, what is saved is less
than what attention spends on keys of another length."""


def runs_of(lengths: Sequence[int]) -> list[tuple[slice, int]]:
    """Runs of rows of a cache that are read apart, with the longest of each: a run begins where no row from there on
    is half as long as the run before."""
    longest = list(accumulate(reversed(lengths), max))[::-1]  # of the rows from each on
    starts = [0]
    for row, length in enumerate(longest):
        if 2 * length < longest[starts[-1]]:
            starts.append(row)
    return [(slice(a, b), longest[a]) for a, b in pairwise([*starts, len(lengths)])]


def rows_at_once(vocab: int, nucleus: bool, device: str) -> int:
    """The rows of logits that tokens are drawn from at a time.

    vocab    tokens of the largest part of the vocabulary
    nucleus  whether top-p is below 1: the search for the nucleus takes three times the memory
    device   its type: cpu or cuda
    """
    return max(1, SAMPLED_AT_ONCE[device] // vocab // (3 if nucleus else 1))


BLOCK = 16
"""Tokens of a block of the KV cache. A sequence's last block is half empty on average."""

ROWS_OF_SLOT = 4
"""Most sequences that are decoded at a time for each slot: logits take memory by sequence, whatever its length."""

READ_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 28}
"""Bytes of keys and values that are gathered from blocks at a time, by type of device: they stay in a CPU's cache,
and are small beside a model on a GPU."""


def slots_of(sequences: int, micro_batches: int) -> int:
    """The sequences of a group that are decoded at a time, if all are as long as they may be."""
    return -(-sequences // micro_batches)


def rows_of(sequences: int, micro_batches: int, states: bool) -> int:
    """Most sequences of a group that are decoded at a time, however short they are.

    states  whether layers keep states: then each has a slot, as these are as large for a short one
    """
    slots = slots_of(sequences, micro_batches)
    return slots if states else min(sequences, ROWS_OF_SLOT * slots)


def blocks_of(columns: int) -> int:
    """The blocks that so many columns take."""
    return -(-columns // BLOCK)


def shared_blocks(prompt: int) -> int:
    """The blocks that sequences with a prompt of so many tokens have in common: its last token is read by each."""
    return (prompt - 1) // BLOCK


def pool_of(whole: int, longest: int, micro_batches: int) -> int:
    """The blocks of the cache of a group of sequences: a part of what all may take at once, with room for any one.

    whole    blocks of all sequences at once, as long as they may be
    longest  blocks of the sequence that may take most
    """
    return max(slots_of(whole, micro_batches), longest)
