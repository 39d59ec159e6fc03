"""What an iteration draws and learns where generation is cut into segments (docs/adr/0020-segments.md), in the steady
state: a sequence of n tokens takes n / segment_tokens iterations, rounded up, and a group as many as its longest."""

import math
from collections import defaultdict
from typing import NamedTuple

from planner.plan.workload import Lengths, Workload


class Drawn(NamedTuple):
    """Of the sequences for which a batch has places, in one iteration.

    running      share of them that draw; the others have ended and wait for their group
    reads        prompts that are read per sequence: one for a new group, one for each sequence that goes on
    read_tokens  mean tokens of these, with what was drawn of a sequence before
    before       mean tokens that were drawn before of those that draw
    new_tokens   tokens that a sequence that draws gets
    ended        share of them that end: so many are scored and learned from
    """

    running: float
    reads: float
    read_tokens: float
    before: float
    new_tokens: Lengths
    ended: float


def drawn(workload: Workload, group_size: int) -> Drawn:
    """What an iteration draws; without segments, all of it."""
    segment, lengths = workload.segment_tokens, workload.new_tokens
    if segment is None:
        return Drawn(1.0, 1 / group_size, workload.prompt_tokens, 0.0, lengths, 1.0)
    calls = {tokens: -(-tokens // segment) for tokens, _ in lengths.points}
    of_sequence = sum(calls[tokens] * share for tokens, share in lengths.points)
    of_group = sum(
        1 - sum(share for tokens, share in lengths.points if calls[tokens] <= done) ** group_size
        for done in range(max(calls.values()))
    )
    running, ended = of_sequence / of_group, 1 / of_group
    before = sum(
        segment * calls[tokens] * (calls[tokens] - 1) / 2 * share for tokens, share in lengths.points
    )
    shares = defaultdict[int, float](float)
    for tokens, share in lengths.points:
        shares[segment] += share * (calls[tokens] - 1) / of_sequence
        shares[tokens - segment * (calls[tokens] - 1)] += share / of_sequence
    new_tokens = Lengths(points=tuple(sorted((tokens, share) for tokens, share in shares.items())))
    reads = ended / group_size + running - ended
    read_tokens = workload.prompt_tokens + before / of_group / reads
    return Drawn(running, reads, read_tokens, before / of_sequence, new_tokens, ended)


def ending(n_groups: int, blocks: int, workload: Workload, group_size: int) -> int:
    """How many of the groups of a batch end in an iteration, at least one in each of its `blocks`."""
    return max(blocks, math.ceil(n_groups * drawn(workload, group_size).ended - 1e-9))
