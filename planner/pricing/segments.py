"""What an iteration draws where generation continues in segments (docs/adr/0020-segments.md): the schedule of
rlhf_tasks.algorithms.shared.segments is carried out on lengths that are drawn at random."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from prefect_rlhf.rlhf_tasks.parallel.layout.work import runs_of

MOST_GROUPS = 128  # of a batch that is simulated; a larger one is given the shares of one of this size
ITERATIONS, WARM_UP = 128, 28


class Round(NamedTuple):
    """What is drawn between two times at which ended groups are counted.

    steps    tokens that the sequence with the most gets, in the mean of the iterations; one without this round has 0
    begins   sequences that draw at its beginning, per sequence of the batch, in the iterations with this round
    running  sequences that draw at a step
    context  tokens of the cache that are read for each of them, in the mean: those of the longest sequence in its run
    """

    steps: float
    begins: float
    running: float
    context: float


class Drawn(NamedTuple):
    """What an iteration draws in the steady state, per sequence of its batch.

    reads        sequences that are read before they are drawn: one of each new group, and all that continue
    read_tokens  mean tokens of these
    again        sequences that draw in later rounds; each is read again, unless it has kept its slot
    again_tokens mean tokens of these; 0 where there are none
    rounds       what is drawn then
    """

    reads: float
    read_tokens: float
    again: float
    again_tokens: float
    rounds: tuple[Round, ...]


@lru_cache(maxsize=64)
def drawn(
    prompt: int, responses: tuple[tuple[int, float], ...], segment: int, n_groups: int, group_size: int
) -> Drawn:
    """What an iteration draws.

    prompt     tokens of a prompt
    responses  (tokens of a response, share of the responses) pairs
    segment    most tokens that are drawn of a sequence in a round
    n_groups   groups of a batch
    """
    n_groups = min(n_groups, MOST_GROUPS)
    tokens, shares = (np.array(each) for each in zip(*responses, strict=True))
    random, of = np.random.default_rng(0), shares / shares.sum()
    lengths = random.choice(tokens, (2 * n_groups, group_size), p=of)
    had = np.zeros_like(lengths)
    begun = np.arange(2 * n_groups)
    reads = read_tokens = again = again_tokens = 0.0
    rounds: list[list[tuple[int, int, int, float]]] = []
    for iteration in range(ITERATIONS):
        counted = iteration >= WARM_UP
        going, new = (had > 0) & (had < lengths), (had[:, 0] == 0).sum()
        if counted:
            reads += going.sum() + new
            read_tokens += (prompt + had[going]).sum() + new * prompt
        number = 0
        while number == 0 or (had == lengths).all(1).sum() < n_groups:
            now = np.minimum(lengths - had, segment)
            if counted:
                # Of its n-th token now, n more columns are read than when the round began.
                seen = (now * _columns(prompt + had, now > 0) + now * (now + 1) / 2).sum()
                rounds.extend([] for _ in range(number + 1 - len(rounds)))
                rounds[number].append((now.max(), (now > 0).sum(), now.sum(), seen))
                if number:
                    again += (now > 0).sum()
                    again_tokens += (prompt + had)[now > 0].sum()
            had, number = had + now, number + 1
        ended = np.flatnonzero((had == lengths).all(1))
        delivered = ended[np.argsort(begun[ended])][:n_groups]
        begun[delivered] = begun.max() + 1 + np.arange(n_groups)
        had[delivered] = 0
        lengths[delivered] = random.choice(tokens, (n_groups, group_size), p=of)
    n_seqs, n = n_groups * group_size, ITERATIONS - WARM_UP
    return Drawn(
        reads / n / n_seqs,
        read_tokens / reads,
        again / n / n_seqs,
        again_tokens / max(again, 1),
        tuple(
            Round(
                sum(steps for steps, *_ in each) / n,
                sum(begins for _, begins, *_ in each) / len(each) / n_seqs,
                sum(all_now for _, _, all_now, _ in each) / sum(steps for steps, *_ in each) / n_seqs,
                sum(seen for *_, seen in each) / sum(all_now for _, _, all_now, _ in each),
            )
            for each in rounds
        ),
    )


def _columns(lengths: np.ndarray, drawn_now: np.ndarray) -> np.ndarray:
    """Columns of the cache that are read for each sequence that is drawn now; 0 for the others.

    The longest sequences enter first, and runs of similar lengths are read together (kv_cache.py).
    """
    longest_first = np.argsort(-np.where(drawn_now, lengths, 0), axis=None, kind="stable")[: drawn_now.sum()]
    columns = np.zeros_like(lengths)
    for rows, longest in runs_of(lengths.flat[longest_first].tolist()) if len(longest_first) else ():
        columns.flat[longest_first[rows]] = longest
    return columns
