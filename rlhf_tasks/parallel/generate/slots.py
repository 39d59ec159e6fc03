"""The sequences that are decoded together: finished ones leave, waiting ones enter."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from rlhf_tasks.parallel.generate.decode_graph import DecodeGraphs
from rlhf_tasks.parallel.generate.kv_cache import KVCache, Piece, vacate
from rlhf_tasks.parallel.generate.sampling import SamplingParams, sample, uniform
from rlhf_tasks.parallel.generate.stage_messages import Relay
from rlhf_tasks.parallel.generate.stop_strings import follow, states_behind
from rlhf_tasks.parallel.layout.slots_of import REFILL_SHARE, slots_of
from rlhf_tasks.parallel.train.engine import Engine

BEFORE = "before"
"""The key of the number of tokens that were drawn of a response before."""

BEGUN = "begun"
"""The key of the iteration whose random numbers a sequence has: that in which it was begun."""


class DecodingPace(NamedTuple):
    """Decoding settings of a kind of device.

    check_every    steps between checks for finished sequences; each check synchronises with the device
    span_multiple  reads of the cache are rounded to a multiple of this many columns
    graphs         whether steps are captured as CUDA graphs
    """

    check_every: int
    span_multiple: int
    graphs: bool


PACES = {"cpu": DecodingPace(1, 1, graphs=False), "cuda": DecodingPace(16, 256, graphs=True)}


class Drawing(NamedTuple):
    """What is the same for all groups of a generation.

    seed, purpose   of the random numbers
    segment_tokens  most tokens that are drawn of a sequence in a segment; None: as many as a response may have
    record_kept     whether to record which tokens top-k and top-p kept
    micro_batches   a group of n sequences has n / micro_batches slots, rounded up
    prefill_tokens  most tokens of a pass over prompts
    """

    params: SamplingParams
    seed: int
    purpose: str
    segment_tokens: int | None
    record_kept: bool
    micro_batches: int
    prefill_tokens: int


class Group:
    """One rank's state of a group of sequences that are decoded together.

    A group has slots. A sequence enters a free slot and leaves it when it has finished; then the next one enters. All
    of this follows from the tokens alone, so every rank does the same without being told.

    A *place* is the number of a sequence in the group. A *row* is the index of a slot that is in use.
    `_places[row]` is the place of the sequence in that slot.

    Before a sequence's first step, its prompt is filled into the cache, all but the last token. The first step reads
    that token. A prompt that another slot holds already is copied from there.

    In segments, a sequence rests when it has the segment's tokens. Where every sequence has a slot, all rest at the
    same step, and the next segment goes on with the slots and the cache as they are. Where there are fewer slots, a
    sequence leaves its slot to rest. In the next segment it enters again, and its prompt and tokens are read again.

    prompts  with three keys. `input_ids`: prompts, followed by the tokens that earlier calls have drawn behind them;
             these count as prompt here. BEFORE [1] int64: how many tokens that are. BEGUN [1] int64: the iteration
             whose random numbers the sequence has

    computed  whether a step was computed whose tokens are not stored yet
    done      whether all sequences have finished, or rest
    """

    def __init__(self, engine: Engine, prompts: SampleBatch, drawing: Drawing) -> None:
        params, device, packed = drawing.params, engine.device, prompts["input_ids"]
        n, lengths, pace = len(prompts), packed.lengths, PACES[engine.device.type]
        self.computed = self.done = False
        self._params, self._stage, self._relay, self._device = params, engine.stage, Relay(engine), device
        self._ids, self._prompts, self._prefill_tokens = prompts.ids, packed.split(), drawing.prefill_tokens
        self._pace, self._slots = pace, slots_of(n, drawing.micro_batches)
        self._before = prompts[BEFORE].values
        self._segment = drawing.segment_tokens or params.max_new_tokens
        self._allowed = [params.max_new_tokens - n for n in self._before.tolist()]
        self._budgets = [min(self._segment, allowed) for allowed in self._allowed]
        most, columns = max(self._allowed), max(map(add, lengths, self._allowed)) - 1
        self._cache = KVCache(self._slots, columns, device, pace.span_multiple)
        # A pass of experts may wait for the numbers of their tokens, which a graph cannot.
        graphs = pace.graphs and not engine.layout.shape.experts
        self._graphs = DecodeGraphs(self._stage, self._cache) if graphs else None
        self._stops = torch.tensor(params.stop_ids, dtype=torch.int64, device=device)
        self._strings = params.stop_strings and params.stop_strings.to(device)
        self._step = -1  # number of the last step
        self._prompt_of = {place: alike[0] for alike in same_prompts(packed) for place in alike}
        self._unsound = torch.zeros(
            (), dtype=torch.bool, device=device
        )  # tokens were drawn from no distribution
        none = torch.zeros(0, dtype=torch.int64, device=device)
        # One entry per row:
        self._places: list[int] = []
        self._started: list[int] = []  # the sequence's first step
        self._order = none  # the places
        self._newest, self._drawn = none, none  # the newest token; tokens of the response so far
        self._finished, self._matched = none.bool(), none  # _matched: states of stop strings
        # One entry per sequence:
        self._read, self._had = (
            self._prompts,
            [0] * n,
        )  # what it enters with; tokens of this that are drawn here
        self._most = torch.tensor(
            self._budgets, device=device
        )  # tokens that are drawn by the end of the segment
        self._lengths = self._most.clone()  # of its response
        self._line_up(range(n))
        self._truncated = torch.ones(n, dtype=torch.bool, device=device)
        # One entry per sequence and token of its response, and one for what is drawn behind it:
        ids, numbers = (
            torch.tensor(prompts.ids, device=device),
            torch.arange(most + 1, device=device),
        )
        positions, begun = torch.tensor(lengths, device=device)[:, None] + numbers, prompts[BEGUN].values
        self._uniforms = torch.zeros(positions.shape, dtype=torch.float64, device=device)
        for iteration in sorted(set(begun.tolist())):
            of = (begun == iteration).nonzero().squeeze(1)
            drawn = uniform(drawing.seed, drawing.purpose, iteration, ids[of, None], positions[of])
            self._uniforms[of] = drawn
        self._tokens = torch.zeros(self._uniforms.shape, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros_like(self._uniforms)
        self._kept: list[list[Tensor]] | None = [[] for _ in lengths] if drawing.record_kept else None

    def compute(self) -> None:
        """Run this rank's stage for the next step, on each row's newest token; before, on the prompts that enter."""
        if self._entering:
            self._enter()
        self._step, self.computed = self._step + 1, True
        output = self._decode()
        if not self._relay.is_last_stage:
            self._relay.send_hidden(output)
            return
        vocabulary = self._relay.vocabulary
        self._relay.drawn.leave_out(output, -torch.inf)
        uniforms = self._uniforms[self._order, self._drawn]
        numbers = self._before[self._order] + self._drawn
        drawn = sample(output, self._params, uniforms, numbers, vocabulary, self._kept is not None)
        self._logprobs[self._order, self._drawn] = drawn.logprobs
        self._unsound |= (drawn.logprobs.isnan() & ~self._finished).any()
        if self._kept is not None and drawn.kept is not None:
            for place, of_row in zip(self._places, vocabulary.tokens_of(drawn.kept), strict=True):
                self._kept[place].append(of_row)
        self._relay.share_tokens(drawn.tokens)

    def _enter(self) -> None:
        """Fill the prompts of the sequences that enter into the next rows, each prompt once."""
        entering, first = self._entering, self._cache.rows
        lengths = [len(self._read[place]) - 1 for place in entering]
        self._cache.enter(lengths)
        self._places += entering
        filled = {}  # prompt -> the first row with it
        sources = [filled.setdefault(self._prompt_of[place], row) for row, place in enumerate(self._places)]
        entered = [(sources[row], row) for row in range(first, len(sources))]
        own = [length * (source == row) for length, (source, row) in zip(lengths, entered, strict=True)]
        for pieces in passes(own, first, self._prefill_tokens):
            self._fill(pieces, [self._places[piece.row] for piece in pieces])
        if shared := [(source, row) for source, row in entered if source != row]:
            self._cache.share(shared)
        self._started += [self._step + 1 - self._had[place] for place in entering]
        new = torch.tensor(entering, device=self._device)
        self._order = torch.cat([self._order, new])
        self._newest = torch.cat([self._newest, self._last[new]])
        had = torch.tensor([self._had[place] for place in entering], device=self._device)
        self._drawn = torch.cat([self._drawn, had])
        self._matched = torch.cat([self._matched, self._state[new]])
        self._finished = torch.cat([self._finished, torch.zeros_like(new).bool()])
        self._entering = []

    def _fill(self, pieces: Sequence[Piece], places: Sequence[int]) -> None:
        """Run this rank's stage on pieces of the prompts of the sequences at `places`."""
        lengths = tuple(piece.stop - piece.first for piece in pieces)
        tokens = [
            self._read[place][piece.first : piece.stop] for place, piece in zip(places, pieces, strict=True)
        ]
        positions = [torch.arange(piece.first, piece.stop) for piece in pieces]
        micro = MicroBatch(
            input_ids=torch.cat(tokens),
            cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self._device),
            position_ids=torch.cat(positions).to(self._device),
            ids=tuple(self._ids[place] for place in places),
            lengths=lengths,
            data={},
        )
        self._cache.fill(pieces)
        x = micro.input_ids if self._relay.is_first_stage else self._relay.receive_hidden(micro.tokens)
        output = self._stage(x, micro, self._cache, torch.zeros(0, dtype=torch.int64, device=self._device))
        if not self._relay.is_last_stage:
            self._relay.send_hidden(output)

    def _decode(self) -> Tensor:
        self._cache.advance()
        rows = self._cache.rows
        micro = MicroBatch(
            input_ids=self._newest,
            cu_seqlens=torch.arange(rows + 1, dtype=torch.int32, device=self._device),
            position_ids=self._cache.positions,
            ids=tuple(self._ids[place] for place in self._places),
            lengths=(1,) * rows,
            data={},
        )
        x = self._newest if self._relay.is_first_stage else self._relay.receive_hidden(rows)
        return self._stage(x, micro, self._cache) if self._graphs is None else self._graphs.run(x, micro)

    def settle(self) -> None:
        """Store the tokens drawn in the last step; at a check, find which sequences leave and enter."""
        tokens, self.computed = self._relay.receive_tokens(self._cache.rows), False
        order = self._order
        most = self._most[order]
        self._tokens[order, self._drawn] = tokens
        ends = torch.isin(tokens, self._stops)
        if self._strings is not None:
            self._matched, completed = follow(self._strings, self._matched, tokens)
            ends |= completed & (self._before[order] + self._drawn >= self._params.min_new_tokens)
        ends &= ~self._finished
        self._truncated[order] &= ~ends
        self._lengths[order] = self._lengths[order].where(~ends, self._drawn + 1)
        # Finished sequences go on until the next check: their tokens beyond the longest response share one column.
        self._drawn = torch.minimum(self._drawn + 1, most)
        self._finished |= ends | (self._drawn == most)
        self._newest = tokens
        some_full = any(
            self._step + 1 - started == self._budgets[place]
            for place, started in zip(self._places, self._started, strict=True)
        )
        if some_full or (self._step + 1) % self._pace.check_every == 0:
            *finished, unsound = torch.cat([self._finished, self._unsound[None]]).tolist()
            if unsound:
                self._refuse_unsound_logits()
            self._turn_over(finished)

    def ended(self) -> list[int]:
        """The ids of the samples that have ended: none of their tokens is still to be drawn."""
        at_most = self._lengths.cpu() == torch.tensor(self._allowed)
        return [
            self._ids[place] for place in (~self._truncated.cpu() | at_most).nonzero().squeeze(1).tolist()
        ]

    def go_on(self) -> None:
        """Begin the next segment: all that has not ended is drawn further."""
        ended = set(self.ended())
        going = [place for place, sample in enumerate(self._ids) if sample not in ended]
        self.done = not going
        had, stays = list(self._budgets), self._slots == len(self._ids)
        for place in going:
            self._budgets[place] = min(had[place] + self._segment, self._allowed[place])
            if self._kept is not None:
                del self._kept[place][had[place] :]
        self._most = torch.tensor(self._budgets, device=self._device)
        moved = torch.tensor(going, dtype=torch.int64, device=self._device)
        self._lengths[moved] = self._most[moved]
        if not stays:
            self._read = list(self._read)
            for place in going:
                self._prompt_of[place], self._had[place] = place, had[place]
                self._read[place] = torch.cat([self._prompts[place], self._tokens[place, : had[place]]])
            self._line_up(going)
        finished = [not stays or self._ids[place] in ended for place in self._places]
        self._finished = torch.tensor(finished, dtype=torch.bool, device=self._device)
        self._leave(finished)

    def _line_up(self, places: Sequence[int]) -> None:
        """Let sequences wait for slots; the first ones enter at the next step."""
        self._last = torch.stack([tokens[-1] for tokens in self._read])  # token with which it enters
        self._state = self._states_of_stop_strings()  # when it enters
        self._waiting = deque(places)
        self._entering = [self._waiting.popleft() for _ in range(min(self._slots, len(places)))]

    def _states_of_stop_strings(self) -> Tensor:
        """The state of each sequence's stop strings behind what was drawn of it before it enters: [n] int64."""
        drawn = list(map(add, self._before.tolist(), self._had))
        if self._strings is None or not any(drawn):
            return torch.zeros_like(self._before)
        texts = [tokens[len(tokens) - n :] for tokens, n in zip(self._read, drawn, strict=True)]
        return states_behind(self._strings, texts)

    def _refuse_unsound_logits(self) -> None:
        """Raises ValueError, naming sample and position, for the first token that was drawn from logits that are not
        finite: that token and all later ones are meaningless."""
        found = self._logprobs[:, :-1].isnan().nonzero().tolist()
        place, number = min(found, key=lambda each: each[1])
        position = len(self._prompts[place]) + number
        raise ValueError(
            f"generate: logits are not finite at position {position} of sample {self._ids[place]} "
            f"(token {number} of its response). The model's weights, or what it computes in "
            f"{self._stage.dtype}, hold NaN or infinity: check its weights, or lower the learning rate."
        )

    def _turn_over(self, finished: list[bool]) -> None:
        running = finished.count(False)
        free = self._slots - running
        enough = running == 0 or free >= max(1, self._slots // REFILL_SHARE)
        self._entering = (
            [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))] if enough else []
        )
        self.done = running + len(self._entering) == 0
        self._leave(finished)

    def _leave(self, finished: list[bool]) -> None:
        """The finished sequences leave, but for those that fill the rows of a captured graph."""
        running = finished.count(False)
        stay = running if self._graphs is None or self._entering else DecodeGraphs.rows_for(running)
        if self.done or stay >= len(finished):
            return
        rows = vacate(finished, stay)
        self._cache.keep(rows)
        self._places = [self._places[row] for row in rows]
        self._started = [self._started[row] for row in rows]
        kept = torch.tensor(rows, dtype=torch.int64, device=self._device)
        self._order, self._newest = self._order[kept], self._newest[kept]
        self._drawn, self._finished, self._matched = (
            self._drawn[kept],
            self._finished[kept],
            self._matched[kept],
        )

    def samples(self) -> dict[int, dict[str, Tensor]]:
        """Sample id -> key -> data, as `generate` returns them, on the CPU. Only for the last stage."""
        lengths, truncated = self._lengths.tolist(), self._truncated.cpu()
        dtype = torch.promote_types(self._stage.dtype, torch.float32)
        responses, logprobs = self._tokens.cpu(), self._logprobs.to("cpu", dtype)
        found = {}
        for i, (sample_id, length) in enumerate(zip(self._ids, lengths, strict=True)):
            prompt = self._prompts[i].cpu()
            found[sample_id] = {
                "input_ids": torch.cat([prompt, responses[i, :length]]),
                "response_mask": torch.arange(len(prompt) + length) >= len(prompt),
                "old_logprobs": torch.cat([logprobs.new_zeros(len(prompt)), logprobs[i, :length]]),
                "truncated": truncated[i : i + 1],
            }
            if self._kept is not None:
                kept = self._kept[i][:length]
                counts = [0] * len(prompt) + [len(tokens) for tokens in kept]
                found[sample_id]["kept_counts"] = torch.tensor(counts, dtype=torch.int32)
                found[sample_id]["kept_tokens"] = torch.cat(kept)
        return found


def same_prompts(prompts: Packed) -> list[list[int]]:
    """The places of the sequences with each prompt, in the order in which prompts come first."""
    found: dict[tuple[int, ...], list[int]] = {}
    for place, prompt in enumerate(prompts.to(torch.device("cpu")).split()):
        found.setdefault(tuple(prompt.tolist()), []).append(place)
    return list(found.values())


def passes(lengths: Sequence[int], first_row: int, most: int) -> Iterator[list[Piece]]:
    """Cut sequences into passes of at most `most` tokens: several whole ones, or a piece of a longer one alone.

    lengths  of the sequences in the rows from `first_row` on; one without tokens is in no pass
    """
    whole: list[Piece] = []
    for row, length in enumerate(lengths, first_row):
        if length > most:
            yield from ([Piece(row, first, min(first + most, length))] for first in range(0, length, most))
            continue
        if whole and sum(piece.stop for piece in whole) + length > most:
            yield whole
            whole = []
        if length:
            whole.append(Piece(row, 0, length))
    if whole:
        yield whole
