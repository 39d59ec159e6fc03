"""Sampling the next token, with one uniform random number per (sample id, position) in any layout and batch; and
which token completes a stop string, by one look-up per token for a whole batch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from prefect_rlhf.rlhf_tasks.parallel.layout.work import rows_at_once
from prefect_rlhf.rlhf_tasks.parallel.model.logprobs import Vocabulary
from prefect_rlhf.rlhf_tasks.system.counter_random import counter_bits


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How responses are sampled.

    temperature     divides the logits; 0 takes the likeliest token (greedy)
    top_k           draw only from the k likeliest tokens, and those tied with the k-th; 0: from all
    top_p           draw only from the smallest set of likeliest tokens whose probability reaches top_p; 1: from all
    min_new_tokens  the first tokens of a response, this many, are never stop ids, and end no response
    max_new_tokens  a response of this many tokens is truncated
    stop_ids        tokens that end a response; the stop id belongs to the response
    stop_strings    strings that end a response with the token that completes one; the token belongs to the response
                    whole, with what it may hold after the string

    Raises ValueError naming the field that is out of range.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_new_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    stop_strings: "StopStrings | None" = None

    def __post_init__(self) -> None:
        checks = {
            "max_new_tokens": (self.max_new_tokens, self.max_new_tokens >= 1, "at least 1"),
            "temperature": (self.temperature, self.temperature >= 0, "at least 0"),
            "top_k": (self.top_k, self.top_k >= 0, "at least 0"),
            "top_p": (self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_new_tokens": (
                self.min_new_tokens,
                0 <= self.min_new_tokens <= self.max_new_tokens,
                f"between 0 and max_new_tokens={self.max_new_tokens}",
            ),
        }
        for field, (value, holds, bounds) in checks.items():
            if not holds:
                raise ValueError(f"{field}={value} must be {bounds}.")


def uniform(seed: int, purpose: str, iteration: int, sample_ids: Tensor, positions: Tensor) -> Tensor:
    """One uniform random number in [0, 1) per (sample id, position), a pure function of the arguments.

    sample_ids, positions  int64, of shapes that broadcast
    Returns float64 of the broadcast shape, on the device of the arguments; bit-equal on every device.
    """
    return counter_bits(seed, purpose, iteration, sample_ids, positions).to(torch.float64) * 2.0**-53


class Draw(NamedTuple):
    """Tokens drawn, one per row, and the distributions that they were drawn from.

    tokens    [n] int64
    logprobs  [n] float64, under the distribution drawn from, after exclusion, temperature, top-k and top-p. Greedy
              sampling reports the log-probability at temperature 1 instead. NaN where there is no distribution (a
              logit is NaN or +inf, or all are -inf); the token is then arbitrary
    kept      [n, this rank's part of the vocabulary] bool, the tokens that could be drawn; None unless asked for
    """

    tokens: Tensor
    logprobs: Tensor
    kept: Tensor | None


def sample(
    logits: Tensor,
    params: SamplingParams,
    uniforms: Tensor,
    new_tokens: Tensor,
    vocabulary: Vocabulary | None = None,
    record_kept: bool = False,
) -> Draw:
    """Draw one token per row by inverting the cumulative distribution in float64, over the parts of the vocabulary.

    logits       [n, this rank's part of the vocabulary] float
    uniforms     [n] float64 in [0, 1); greedy sampling does not use them
    new_tokens   [n] int64, number of each token in its response, from 0; below `params.min_new_tokens`, stop ids are
                 excluded
    vocabulary   its parts; None: this rank has all of it
    record_kept  whether to tell which tokens could be drawn
    Returns tokens and logprobs bit-equal on all tp ranks. Collective over these. No rank sees more of another's part
    than its greatest logits (top-k) and sums. Rows are drawn a few at a time, which bounds the temporary memory.
    """
    vocabulary = vocabulary or Vocabulary((logits.shape[1],))
    rows = rows_at_once(max(vocabulary.sizes), params.top_p < 1, logits.device.type)
    drawn = [
        _sample(*parts, params, vocabulary, record_kept)
        for parts in zip(logits.split(rows), uniforms.split(rows), new_tokens.split(rows), strict=True)
    ]
    kept = [draw.kept for draw in drawn if draw.kept is not None]
    return Draw(
        torch.cat([draw.tokens for draw in drawn]),
        torch.cat([draw.logprobs for draw in drawn]),
        torch.cat(kept) if record_kept else None,
    )


def _sample(
    logits: Tensor,
    uniforms: Tensor,
    new_tokens: Tensor,
    params: SamplingParams,
    vocabulary: Vocabulary,
    record_kept: bool,
) -> Draw:
    """`sample` of a few rows."""
    logits = _without_early_stops(logits, new_tokens, params, vocabulary)
    if params.temperature == 0:
        tokens, logprobs = _likeliest(logits.to(torch.float64), vocabulary)
    else:
        logits = _keep_likeliest(logits, params, vocabulary)
        tokens, logprobs = _inverted(logits, params.temperature, uniforms, vocabulary)
    return Draw(tokens, logprobs, logits.isfinite() if record_kept else None)


def _without_early_stops(
    logits: Tensor, new_tokens: Tensor, params: SamplingParams, vocabulary: Vocabulary
) -> Tensor:
    """Logits [n, part], -inf for stop ids where a response is too short to end."""
    start, size = vocabulary.start, logits.shape[1]
    stops = [stop - start for stop in params.stop_ids if start <= stop < start + size]
    if not (params.min_new_tokens and stops):
        return logits
    early = new_tokens[:, None] < params.min_new_tokens
    columns = torch.tensor(stops, device=logits.device)
    return logits.index_copy(1, columns, logits[:, columns].masked_fill(early, -torch.inf))


def _likeliest(scores: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row [n, part], and its log-probability."""
    columns = scores.argmax(-1, keepdim=True)
    mine = torch.stack(
        [scores.gather(-1, columns)[:, 0], columns[:, 0] + vocabulary.start, scores.logsumexp(-1)]
    )
    highest, tokens, log_sums = vocabulary.gather(mine).unbind(1)
    owner = highest.argmax(0, keepdim=True)
    logprobs = highest.gather(0, owner)[0] - log_sums.logsumexp(0)
    return tokens.gather(0, owner)[0].long(), logprobs


def _inverted(
    logits: Tensor, temperature: float, uniforms: Tensor, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor]:
    """A token of each row [n, part] by inverting its cumulative distribution, and its log-probability.

    The rank in whose part the random number lies finds the token.
    """
    scores = _scaled(logits, temperature)
    peak = _peak(scores.amax(-1))
    scores -= peak[:, None]
    cumulative = scores.exp().cumsum_(-1)
    peaks, sums = vocabulary.gather(torch.stack([peak, cumulative[:, -1]])).unbind(1)  # [tp, n]
    highest = peaks.amax(0)
    factors = (peaks - highest).exp()
    running = (sums * factors).cumsum(0)
    total, here = running[-1], vocabulary.tp_rank
    # u < 1, but u * total may be rounded up to total, which would select no token.
    threshold = torch.minimum(uniforms * total, torch.nextafter(total, total.new_zeros(())))
    owner = (running <= threshold).sum(0).clamp(max=len(running) - 1)[None]
    mine = (threshold - running[here - 1]) / factors[here] if here else threshold / factors[here]
    mine = torch.minimum(mine, torch.nextafter(sums[here], total.new_zeros(())))
    tokens = torch.searchsorted(cumulative, mine[:, None], right=True)
    tokens = tokens.clamp(max=scores.shape[-1] - 1)  # a NaN threshold gives an index past the last token
    logprobs = scores.gather(-1, tokens)[:, 0] + (peak - highest) - total.log()
    of_ranks = vocabulary.gather(torch.stack([tokens[:, 0] + vocabulary.start, logprobs]))
    of_owner = of_ranks.gather(0, owner[:, None].expand(1, 2, -1))[0]
    return of_owner[0].long(), of_owner[1]


def _keep_likeliest(logits: Tensor, params: SamplingParams, vocabulary: Vocabulary) -> Tensor:
    """Logits [n, part] with -inf for the tokens that top-k, and after it top-p, exclude."""
    if 0 < params.top_k < sum(vocabulary.sizes):
        best = logits.topk(min(params.top_k, logits.shape[-1])).values
        best = F.pad(best, (0, params.top_k - best.shape[1]), value=-torch.inf)
        kth = vocabulary.gather(best).movedim(0, 1).flatten(1).topk(params.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if params.top_p < 1:
        logits = _keep_nucleus(logits, params, vocabulary)
    return logits


def _keep_nucleus(logits: Tensor, params: SamplingParams, vocabulary: Vocabulary) -> Tensor:
    """Logits [n, part] with -inf outside the smallest set of likeliest tokens whose probability reaches top-p.

    The least logit in the set is found digit by digit of its bits, in base 256: each rank tells how much probability
    its part has from each of 256 logits on. Of equal logits, those of the first tokens are in the set.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    ordered = wide.sort(-1, descending=True).values
    falling = ~_to_bits(ordered)  # ascending, as searchsorted needs them
    scores = _scaled(ordered, params.temperature)
    peak = _peak(vocabulary.gather(scores[:, 0]).amax(0))
    mass = F.pad(scores.sub_(peak[:, None]).exp_().cumsum_(-1), (1, 0))  # of the first 0, 1, ... tokens

    def mass_of(counts: Tensor) -> Tensor:
        return vocabulary.gather(mass.gather(1, counts)).sum(0)

    target = params.top_p * mass_of(counts=falling.new_full((len(falling), 1), falling.shape[1]))
    n_bits = 8 * wide.element_size()
    least = falling.new_full((len(falling), 1), -(2 ** (n_bits - 1)))
    for shift in range(n_bits - 8, -1, -8):
        digits = least + (torch.arange(256, device=logits.device) << shift)
        from_here = mass_of(torch.searchsorted(falling, ~digits, right=True))
        last = ((from_here >= target).sum(1, keepdim=True) - 1).clamp(min=0)
        least = digits.gather(1, last)
    above = mass_of(torch.searchsorted(falling, ~least))
    border = _from_bits(least, wide.dtype)
    of_one = (_scaled(border, params.temperature) - peak[:, None]).exp()
    needed = ((target - above) / of_one).ceil().clamp(min=1)
    equal = wide == border
    before = vocabulary.gather(equal.sum(1, keepdim=True))[: vocabulary.tp_rank].sum(0)
    left_out = (wide < border) | (equal & (before + equal.cumsum(1) > needed))
    return logits.masked_fill(left_out, -torch.inf)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Logits in float64 divided by the temperature, a tensor of their own."""
    scores = logits.to(torch.float64, copy=True)
    return scores if temperature == 1 else scores.div_(temperature)


def _peak(highest: Tensor) -> Tensor:
    """What is subtracted from scores [n] float64: their maximum, or a number, where all are -inf."""
    return highest.clamp(min=torch.finfo(torch.float64).min)


def _to_bits(values: Tensor) -> Tensor:
    """int64 numbers in the order of floats (float32 or float64), equal for equal ones; the same shape."""
    kind = torch.int32 if values.dtype == torch.float32 else torch.int64
    bits = values.view(kind).long()
    return torch.where(bits >= 0, bits, torch.iinfo(kind).min - bits)


def _from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The floats of such numbers."""
    kind = torch.int32 if dtype == torch.float32 else torch.int64
    return torch.where(bits >= 0, bits, torch.iinfo(kind).min - bits).to(kind).view(dtype)


# Stop strings

BYTES = 256  # different ones


class TokenTexts:
    """The texts of all token ids in UTF-8. A token may hold part of a character, and text around a string."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        self._bytes = np.frombuffer(b"".join(texts), dtype=np.uint8).astype(np.int64)
        self._starts = lengths.cumsum() - lengths
        # Longest texts first: the tokens with a byte at a place are then the first ones.
        self._order = np.argsort(-lengths, kind="stable")
        self._counts = [int((lengths > place).sum()) for place in range(int(lengths.max(initial=0)))]
        self.count = len(texts)

    def bytes(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Of each place in a text: the ids of the tokens that have a byte there, and these bytes."""
        for place, count in enumerate(self._counts):
            longer = self._order[:count]
            yield longer, self._bytes[self._starts[longer] + place]


class StopTable(NamedTuple):
    """Automata over tokens, of one set of stop strings each, on a device.

    A row's *state* says how much of a string of its set its text ends with; 0: nothing.
    kinds    [sets, tokens + 1] int32: where in `entries` those of a token begin. The last column is for token ids
             that the tokenizer does not have, and which have no text
    entries  [..] int32, at a token's kind and a state: twice the next state, plus 1 where a string was completed
    """

    kinds: Tensor
    entries: Tensor

    @staticmethod
    def of(sets: Sequence["StopStrings"], device: torch.device) -> "StopTable":
        """Those of some sets, which have their numbers in this order."""
        firsts = accumulate((len(each.entries) for each in sets), initial=0)
        kinds = [each.kinds + first for each, first in zip(sets, firsts, strict=False)]
        entries = torch.cat([each.entries for each in sets])
        return StopTable(torch.stack(kinds).to(device), entries.to(device))


class StopStrings:
    """How a set of stop strings is found, token by token (Aho and Corasick, CACM 1975).

    strings  none empty; there may be none
    texts    of the tokens

    To the automaton, whose states are the prefixes of strings, a token is a function: what it makes of each state.
    Few of these differ, so a vocabulary of 150,000 takes a twentieth of a second, and less than a megabyte.
    """

    def __init__(self, strings: Sequence[str], texts: TokenTexts) -> None:
        after, completes = _automaton([string.encode() for string in strings])
        steps = 2 * after + completes
        functions = [2 * np.arange(len(after), dtype=np.int64)]
        numbers = {functions[0].tobytes(): 0}

        @cache
        def number(before: int, byte: int) -> int:
            """Of the function that a byte makes of another."""
            function = steps[functions[before] >> 1, byte] | (functions[before] & 1)
            found = numbers.setdefault(function.tobytes(), len(functions))
            if found == len(functions):
                functions.append(function)
            return found

        kinds = np.zeros(texts.count + 1, dtype=np.int64)
        for tokens, bytes_ in texts.bytes():
            pairs, places = np.unique(BYTES * kinds[tokens] + bytes_, return_inverse=True)
            kinds[tokens] = np.array([number(*divmod(pair, BYTES)) for pair in pairs.tolist()])[places]
        entries = np.stack(functions, axis=1)
        self.kinds = torch.from_numpy(kinds.astype(np.int32))
        self.entries = torch.from_numpy(
            (2 * len(functions) * (entries >> 1) + (entries & 1)).astype(np.int32)
        ).flatten()

    def to(self, device: torch.device) -> StopTable:
        """The table of this set alone."""
        return StopTable.of([self], device)


def follow(table: StopTable, states: Tensor, tokens: Tensor, sets: Tensor | int = 0) -> tuple[Tensor, Tensor]:
    """The states of some rows after one token more each, and whether this token completed a stop string.

    states, tokens  [n] int64
    sets            [n] int64: the number of each row's set
    Returns [n] int64 and [n] bool.
    """
    kinds = table.kinds[sets, tokens.clamp(max=table.kinds.shape[1] - 1)]
    entry = table.entries[states + kinds].long()
    return entry >> 1, (entry & 1).bool()


def states_after(table: StopTable, texts: Sequence[Tensor]) -> Tensor:
    """The states in the first set after some texts, all followed at the same time: [n] int64.

    texts  the tokens of each, [L] int64; L may be 0
    """
    lengths = torch.tensor([len(text) for text in texts], device=table.kinds.device)
    states = torch.zeros_like(lengths)
    for number, tokens in enumerate(pad_sequence(list(texts)).unbind()):
        states = torch.where(number < lengths, follow(table, states, tokens)[0], states)
    return states


def _automaton(strings: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """([states, 256] int64 the state after a byte; [states, 256] int64, 1 where a string ends with it)."""
    prefixes = sorted(
        {b"", *(string[: length + 1] for string in strings for length in range(len(string)))},
        key=lambda p: (len(p), p),
    )
    number = {prefix: state for state, prefix in enumerate(prefixes)}
    after = np.zeros((len(prefixes), BYTES), dtype=np.int64)
    completes = np.zeros_like(after)
    rest = [0] * len(prefixes)  # of each, the longest other state that it ends with
    for prefix, state in number.items():
        if prefix:
            before = rest[number[prefix[:-1]]]
            rest[state] = int(after[before, prefix[-1]]) if len(prefix) > 1 else 0
            after[state], completes[state] = after[rest[state]], completes[rest[state]]
        for byte in range(BYTES):
            longer = prefix + bytes([byte])
            if longer in number:
                after[state, byte] = number[longer]
            if longer in strings:
                completes[state, byte] = 1
    return after, completes
