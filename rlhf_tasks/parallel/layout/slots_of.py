"""How much of a generation happens at a time: what the engine does and the planner prices."""

PREFILL_TOKENS = 8192
"""Most tokens of a pass over prompts: enough to keep a device busy, and its activations are small beside a model."""

REFILL_SHARE = 8
"""Waiting sequences enter once an eighth of the slots is free: a pass over a prompt takes about as long as a step."""

SAMPLED_AT_ONCE = 1 << 22
"""Logits of a rank that tokens are drawn from at a time, so that their float64 copies stay small beside a model."""


def slots_of(sequences: int, micro_batches: int) -> int:
    """The sequences of a group that are decoded at a time."""
    return -(-sequences // micro_batches)
