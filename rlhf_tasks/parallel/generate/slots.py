"""The sequences that are decoded together: finished ones leave, waiting ones enter. The messages between the ranks
that decode them."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.generate.kv_cache import DecodeGraphs, KVCache, Piece, vacate
from prefect_rlhf.rlhf_tasks.parallel.generate.sampling import (
    SamplingParams,
    follow,
    sample,
    states_after,
    uniform,
)
from prefect_rlhf.rlhf_tasks.parallel.layout.work import REFILL_SHARE, slots_of
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine

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


class Responses:
    """What is drawn of a group's n sequences, by place. L is the most tokens that are drawn of one, and one more.

    before     [n] int64: tokens of a response that earlier calls have drawn; they are not counted in what follows
    allowed    most tokens of each response
    most       most tokens of each by the end of the segment; `most_tensor` [n] int64 is the same on the device
    lengths    [n] int64; while a response runs, its `most`
    truncated  [n] bool: neither a stop id nor a stop string has ended it
    uniforms   [n, L] float64: the random number of each token
    tokens     [n, L] int64. The last column is for what is drawn after the end of the longest response
    logprobs   [n, L] float64; on the last stage alone
    kept       of each, token after token: the ids [..] int32 that could be drawn; None unless they are recorded
    """

    def __init__(self, prompts: SampleBatch, drawing: Drawing) -> None:
        device = prompts["input_ids"].values.device
        lengths = prompts["input_ids"].lengths
        self._segment = drawing.segment_tokens or drawing.params.max_new_tokens
        self.before = prompts[BEFORE].values
        self.allowed = [drawing.params.max_new_tokens - before for before in self.before.tolist()]
        self.most = [min(self._segment, allowed) for allowed in self.allowed]
        self.most_tensor = torch.tensor(self.most, device=device)
        self.lengths = self.most_tensor.clone()
        self.truncated = torch.ones(len(prompts), dtype=torch.bool, device=device)
        ids = torch.tensor(prompts.ids, device=device)
        numbers = torch.arange(max(self.allowed) + 1, device=device)
        positions = torch.tensor(lengths, device=device)[:, None] + numbers
        self.uniforms = torch.zeros(positions.shape, dtype=torch.float64, device=device)
        begun = prompts[BEGUN].values
        for iteration in sorted(set(begun.tolist())):
            of = (begun == iteration).nonzero().squeeze(1)
            self.uniforms[of] = uniform(
                drawing.seed, drawing.purpose, iteration, ids[of, None], positions[of]
            )
        self.tokens = torch.zeros(self.uniforms.shape, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros_like(self.uniforms)
        self.kept: list[list[Tensor]] | None = [[] for _ in lengths] if drawing.record_kept else None

    def ended(self) -> list[bool]:
        """Of each, whether none of its tokens is still to be drawn."""
        full = self.lengths.cpu() == torch.tensor(self.allowed)
        return (~self.truncated.cpu() | full).tolist()

    def extend(self, places: Sequence[int]) -> None:
        """Let the responses at some places have the tokens of another segment."""
        for place in places:
            if self.kept is not None:
                del self.kept[place][self.most[place] :]
            self.most[place] = min(self.most[place] + self._segment, self.allowed[place])
        device = self.lengths.device
        self.most_tensor = torch.tensor(self.most, device=device)
        extended = torch.tensor(places, dtype=torch.int64, device=device)
        self.lengths[extended] = self.most_tensor[extended]


class Queue:
    """The sequences that wait for a slot, and what each enters with, by place.

    tokens    [..] int64 each: those that are read. First the prompt; in a later segment also what was drawn here
    drawn     how many of these were drawn here
    like      the first place with the same tokens
    last      [n] int64: the last one of the tokens, which the first step reads
    matched   [n] int64: the states of stop strings after the tokens
    waiting   places, in the order in which they enter
    entering  those that enter at the next step
    """

    def __init__(self, prompts: Packed) -> None:
        n = len(prompts.lengths)
        self.tokens = prompts.split()
        self.drawn = [0] * n
        self.like = {place: alike[0] for alike in same_prompts(prompts) for place in alike}
        self.last = torch.zeros(n, dtype=torch.int64, device=prompts.values.device)
        self.matched = torch.zeros_like(self.last)
        self.waiting = deque[int]()
        self.entering: list[int] = []

    def line_up(self, places: Sequence[int], slots: int, before: Tensor, strings: Tensor | None) -> None:
        """Let sequences wait for slots, which are all free. before: as in `Responses`; strings: their table"""
        self.last = torch.stack([tokens[-1] for tokens in self.tokens])
        drawn = list(map(add, before.tolist(), self.drawn))
        self.matched = torch.zeros_like(before)
        if strings is not None and any(drawn):
            texts = [tokens[len(tokens) - n :] for tokens, n in zip(self.tokens, drawn, strict=True)]
            self.matched = states_after(strings, texts)
        self.waiting = deque(places)
        self.admit(slots)

    def admit(self, slots: int) -> None:
        """Let the first ones enter at the next step, as many as there are free slots."""
        self.entering = [self.waiting.popleft() for _ in range(min(slots, len(self.waiting)))]


@dataclass
class Rows:
    """The slots in use. Each list and tensor has an entry per row.

    places    the place of the sequence in the slot; `order` [rows] int64 is the same on the device
    started   the step in which the first token of its response was drawn, or would have been
    newest    [rows] int64: the token that the next step reads
    drawn     [rows] int64: tokens of the response so far
    finished  [rows] bool
    matched   [rows] int64: the states of stop strings
    """

    places: list[int]
    started: list[int]
    order: Tensor
    newest: Tensor
    drawn: Tensor
    finished: Tensor
    matched: Tensor

    @staticmethod
    def none(device: torch.device) -> "Rows":
        empty = torch.zeros(0, dtype=torch.int64, device=device)
        return Rows([], [], empty, empty, empty, empty.bool(), empty)

    def enter(self, queue: Queue, step: int) -> None:
        """Give those that enter the next rows. step: the number of their first step"""
        drawn_before = [queue.drawn[place] for place in queue.entering]
        new = torch.tensor(queue.entering, device=self.order.device)
        self.places += queue.entering
        self.started += [step - drawn for drawn in drawn_before]
        self.order = torch.cat([self.order, new])
        self.newest = torch.cat([self.newest, queue.last[new]])
        self.drawn = torch.cat([self.drawn, new.new_tensor(drawn_before)])
        self.finished = torch.cat([self.finished, torch.zeros_like(new).bool()])
        self.matched = torch.cat([self.matched, queue.matched[new]])

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self.places = [self.places[row] for row in rows]
        self.started = [self.started[row] for row in rows]
        index = torch.tensor(rows, dtype=torch.int64, device=self.order.device)
        self.order = self.order[index]
        self.newest = self.newest[index]
        self.drawn = self.drawn[index]
        self.finished = self.finished[index]
        self.matched = self.matched[index]


class Group:
    """One rank's state of a group of sequences that are decoded together.

    A group has slots. A sequence enters a free slot and leaves it when it has finished; then the next one enters. All
    of this follows from the tokens alone, so every rank does the same without being told.

    A *place* is the number of a sequence in the group. A *row* is the index of a slot that is in use.

    Before a sequence's first step, its prompt is filled into the cache, all but the last token. The first step reads
    that token. A prompt that another slot holds already is copied from there; where layers keep states, only from a
    sequence that enters at the same time.

    In segments, a sequence rests when it has the segment's tokens. Where every sequence has a slot, all rest at the
    same step, and the next segment continues with the slots and the cache as they are. Where there are fewer slots, a
    sequence leaves its slot to rest. In the next segment it enters again, and its prompt and tokens are read again.

    prompts  with three keys. `input_ids`: prompts, followed by the tokens that earlier calls have drawn after them;
             these count as prompt here. BEFORE [1] int64: how many tokens that are. BEGUN [1] int64: the iteration
             whose random numbers the sequence has

    computed  whether a step was computed whose tokens are not stored yet
    done      whether all sequences have finished, or rest
    """

    def __init__(self, engine: Engine, prompts: SampleBatch, drawing: Drawing) -> None:
        device = engine.device
        stop_strings = drawing.params.stop_strings
        # What is always the same:
        self._drawing = drawing
        self._pace = PACES[device.type]
        self._stage = engine.stage
        self._relay = Relay(engine)
        self._device = device
        self._ids = prompts.ids
        self._prompts = prompts["input_ids"].split()
        self._slots = slots_of(len(prompts), drawing.micro_batches)
        self._stops = torch.tensor(drawing.params.stop_ids, dtype=torch.int64, device=device)
        self._strings = stop_strings and stop_strings.to(device)
        # What changes with the steps:
        self.computed = False
        self.done = False
        self._step = -1  # number of the last step
        self._responses = Responses(prompts, drawing)
        self._rows = Rows.none(device)
        self._queue = Queue(prompts["input_ids"])
        self._queue.line_up(range(len(prompts)), self._slots, self._responses.before, self._strings)
        # The last token of a response is never read, so it needs no column.
        columns = max(map(add, prompts["input_ids"].lengths, self._responses.allowed)) - 1
        self._cache = KVCache(self._slots, columns, device, self._pace.span_multiple)
        # A pass of experts may wait for the numbers of their tokens, which a graph cannot; and the step that runs
        # before a capture would change states twice.
        shape = engine.layout.shape
        graphs = self._pace.graphs and not (shape.experts or shape.keeps_states)
        self._graphs = DecodeGraphs(self._stage, self._cache) if graphs else None
        # Whether a token was drawn from no distribution. It stays on the device until the next check, as a look at it
        # would wait for the device.
        self._unsound = torch.zeros((), dtype=torch.bool, device=device)

    def compute(self) -> None:
        """Run this rank's stage for the next step, on each row's newest token; before, on the prompts that enter."""
        if self._queue.entering:
            self._enter()
        self._step += 1
        self.computed = True
        output = self._decode()
        if not self._relay.is_last_stage:
            self._relay.send_hidden(output)
            return
        responses, vocabulary = self._responses, self._relay.vocabulary
        order, drawn = self._rows.order, self._rows.drawn
        vocabulary.leave_out(output, -torch.inf)
        uniforms = responses.uniforms[order, drawn]
        numbers = responses.before[order] + drawn
        draw = sample(output, self._drawing.params, uniforms, numbers, vocabulary, responses.kept is not None)
        responses.logprobs[order, drawn] = draw.logprobs
        self._unsound |= (draw.logprobs.isnan() & ~self._rows.finished).any()
        if responses.kept is not None and draw.kept is not None:
            for place, of_row in zip(self._rows.places, vocabulary.tokens_of(draw.kept), strict=True):
                responses.kept[place].append(of_row)
        self._relay.share_tokens(draw.tokens)

    def _enter(self) -> None:
        """Fill the prompts of the sequences that enter into the next rows, each prompt once."""
        queue = self._queue
        first = self._cache.rows
        lengths = [len(queue.tokens[place]) - 1 for place in queue.entering]
        self._cache.enter(lengths)
        self._rows.enter(queue, self._step + 1)
        places = self._rows.places
        filled = {}  # prompt -> the first row with it
        # A state is that after the newest token: only sequences that enter together have the same.
        since = first if self._stage.layout.shape.keeps_states else 0
        alike = [
            (filled.setdefault(queue.like[place], row), row)
            for row, place in enumerate(places[since:], since)
        ]
        entered = alike[first - since :]
        to_fill = [
            length if source == row else 0 for length, (source, row) in zip(lengths, entered, strict=True)
        ]
        for pieces in passes(to_fill, first, self._drawing.prefill_tokens):
            self._fill(pieces, [places[piece.row] for piece in pieces])
        if shared := [(source, row) for source, row in entered if source != row]:
            self._cache.share(shared)
        queue.entering = []

    def _fill(self, pieces: Sequence[Piece], places: Sequence[int]) -> None:
        """Run this rank's stage on pieces of the prompts of the sequences at `places`."""
        lengths = tuple(piece.stop - piece.first for piece in pieces)
        tokens = [
            self._queue.tokens[place][piece.first : piece.stop]
            for place, piece in zip(places, pieces, strict=True)
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
        """This stage's output [rows, ...] for each row's newest token."""
        self._cache.advance()
        rows = self._cache.rows
        micro = MicroBatch(
            input_ids=self._rows.newest,
            cu_seqlens=torch.arange(rows + 1, dtype=torch.int32, device=self._device),
            position_ids=self._cache.positions,
            ids=tuple(self._ids[place] for place in self._rows.places),
            lengths=(1,) * rows,
            data={},
        )
        x = micro.input_ids if self._relay.is_first_stage else self._relay.receive_hidden(rows)
        return self._stage(x, micro, self._cache) if self._graphs is None else self._graphs.run(x, micro)

    def settle(self) -> None:
        """Store the tokens drawn in the last step; at a check, find which sequences leave and enter."""
        tokens = self._relay.receive_tokens(self._cache.rows)
        self.computed = False
        responses, rows = self._responses, self._rows
        order = rows.order
        most = responses.most_tensor[order]
        responses.tokens[order, rows.drawn] = tokens
        ends = torch.isin(tokens, self._stops)
        if self._strings is not None:
            rows.matched, completed = follow(self._strings, rows.matched, tokens)
            ends |= completed & (responses.before[order] + rows.drawn >= self._drawing.params.min_new_tokens)
        ends &= ~rows.finished
        responses.truncated[order] &= ~ends
        responses.lengths[order] = responses.lengths[order].where(~ends, rows.drawn + 1)
        # Finished sequences run until the next check: their tokens beyond the longest response share one column.
        rows.drawn = torch.minimum(rows.drawn + 1, most)
        rows.finished |= ends | (rows.drawn == most)
        rows.newest = tokens
        some_full = any(
            self._step + 1 - started == responses.most[place]
            for place, started in zip(rows.places, rows.started, strict=True)
        )
        if some_full or (self._step + 1) % self._pace.check_every == 0:
            *finished, unsound = torch.cat([rows.finished, self._unsound[None]]).tolist()
            if unsound:
                self._refuse_unsound_logits()
            self._turn_over(finished)

    def ended(self) -> list[int]:
        """The ids of the samples that have ended: none of their tokens is still to be drawn."""
        return [sample for sample, ended in zip(self._ids, self._responses.ended(), strict=True) if ended]

    def drawn(self, place: int) -> Tensor:
        """The tokens [n] int64 of a response as far as they are stored."""
        responses, rows = self._responses, self._rows
        counts = responses.lengths.clone()
        counts[rows.order] = torch.minimum(counts[rows.order], rows.drawn)
        return responses.tokens[place, : int(counts[place])]

    def next_segment(self) -> None:
        """Begin the next segment: all that has not ended is drawn further."""
        responses = self._responses
        queue = self._queue
        ended = responses.ended()
        running = [place for place, has_ended in enumerate(ended) if not has_ended]
        self.done = not running
        drawn = list(responses.most)  # of those that run
        responses.extend(running)
        all_have_slots = self._slots == len(self._ids)
        if not all_have_slots:
            for place in running:
                queue.like[place] = place
                queue.drawn[place] = drawn[place]
                tokens = responses.tokens[place, : drawn[place]]
                queue.tokens[place] = torch.cat([self._prompts[place], tokens])
            queue.line_up(running, self._slots, responses.before, self._strings)
        leaves = [not all_have_slots or ended[place] for place in self._rows.places]
        self._rows.finished = torch.tensor(leaves, dtype=torch.bool, device=self._device)
        self._leave(leaves)

    def _refuse_unsound_logits(self) -> None:
        """Raises ValueError, naming sample and position, for the first token that was drawn from logits that are not
        finite: that token and all later ones are meaningless."""
        unsound = self._responses.logprobs[:, :-1].isnan().nonzero().tolist()
        place, number = min(unsound, key=lambda each: each[1])
        position = len(self._prompts[place]) + number
        raise ValueError(
            f"generate: logits are not finite at position {position} of sample {self._ids[place]} "
            f"(token {number} of its response). The model's weights, or what it computes in "
            f"{self._stage.dtype}, hold NaN or infinity: check its weights, or lower the learning rate."
        )

    def _turn_over(self, finished: list[bool]) -> None:
        """Let finished sequences leave and waiting ones enter. finished: by row"""
        running = finished.count(False)
        free = self._slots - running
        enough = running == 0 or free >= max(1, self._slots // REFILL_SHARE)
        self._queue.admit(free if enough else 0)
        self.done = running + len(self._queue.entering) == 0
        self._leave(finished)

    def _leave(self, finished: list[bool]) -> None:
        """The finished sequences leave, but for those that fill the rows of a captured graph."""
        running = finished.count(False)
        compact = self._graphs is None or self._queue.entering
        stay = running if compact else DecodeGraphs.rows_for(running)
        if self.done or stay >= len(finished):
            return
        rows = vacate(finished, stay)
        self._cache.keep(rows)
        self._rows.keep(rows)

    def samples(self) -> dict[int, dict[str, Tensor]]:
        """Sample id -> key -> data, as `generate` returns them, on the CPU. Only for the last stage."""
        responses = self._responses
        truncated = responses.truncated.cpu()
        tokens = responses.tokens.cpu()
        logprobs = responses.logprobs.to("cpu", torch.promote_types(self._stage.dtype, torch.float32))
        samples = {}
        for place, (sample_id, length) in enumerate(zip(self._ids, responses.lengths.tolist(), strict=True)):
            prompt = self._prompts[place].cpu()
            data = {
                "input_ids": torch.cat([prompt, tokens[place, :length]]),
                "response_mask": torch.arange(len(prompt) + length) >= len(prompt),
                "old_logprobs": torch.cat([logprobs.new_zeros(len(prompt)), logprobs[place, :length]]),
                "truncated": truncated[place : place + 1],
            }
            if responses.kept is not None:
                kept = responses.kept[place][:length]
                counts = [0] * len(prompt) + [len(ids) for ids in kept]
                data["kept_counts"] = torch.tensor(counts, dtype=torch.int32)
                data["kept_tokens"] = torch.cat(kept)
            samples[sample_id] = data
        return samples


def same_prompts(prompts: Packed) -> list[list[int]]:
    """The places of the sequences with each prompt, in the order in which prompts come first."""
    places_of: dict[tuple[int, ...], list[int]] = {}
    for place, prompt in enumerate(prompts.to(torch.device("cpu")).split()):
        places_of.setdefault(tuple(prompt.tolist()), []).append(place)
    return list(places_of.values())


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


class Relay:
    """The messages of one group of sequences.

    Per step there are hidden states from each stage to the next (point to point, shapes known on both sides); what
    the tp ranks of the last stage tell each other to draw a token (`vocabulary`); and a broadcast of the drawn tokens
    from the last stage over the pp group. All ranks of the replica make these calls in the same order. With one stage
    and tp 1 nothing is sent.
    """

    def __init__(self, engine: Engine) -> None:
        placement, stage = engine.placement, engine.stage
        self.vocabulary = engine.drawn
        self._stages = placement.pp_group(engine.groups.rank)
        self._pp_group = engine.groups[self._stages]
        self._pp_rank = engine.coordinate.pp
        self._width = stage.widths[0]
        self._dtype = stage.dtype
        self._device = stage.device
        self.is_first_stage = stage.is_first
        self.is_last_stage = stage.is_last
        self._in_flight: list[tuple[dist.Work | None, Tensor]] = []  # tensors must live until they are sent
        self._tokens: Tensor | None = None

    def receive_hidden(self, tokens: int) -> Tensor:
        """The hidden states [tokens, columns] from the previous stage."""
        hidden = torch.empty(tokens, self._width, dtype=self._dtype, device=self._device)
        dist.recv(hidden, src=self._stages[self._pp_rank - 1], group=self._pp_group)
        return hidden

    def send_hidden(self, hidden: Tensor) -> None:
        """Start to send hidden states [tokens, columns] to the next stage."""
        hidden = hidden.contiguous()
        work = dist.isend(hidden, dst=self._stages[self._pp_rank + 1], group=self._pp_group)
        self._in_flight.append((work, hidden))

    def share_tokens(self, tokens: Tensor) -> None:
        """On the last stage: start to send the drawn tokens [n] int64 to the other stages."""
        self._tokens = tokens
        if self._pp_group is not None:
            work = dist.broadcast(tokens, src=self._stages[-1], group=self._pp_group, async_op=True)
            self._in_flight.append((work, tokens))

    def receive_tokens(self, n: int) -> Tensor:
        """The tokens [n] int64 drawn in the last step. Waits until this rank's messages of that step are sent."""
        for work, _ in self._in_flight:
            if work is not None:
                work.wait()
        self._in_flight.clear()
        if self.is_last_stage:
            assert self._tokens is not None, "no tokens were drawn yet"
            return self._tokens
        tokens = torch.empty(n, dtype=torch.int64, device=self._device)
        dist.broadcast(tokens, src=self._stages[-1], group=self._pp_group)
        return tokens
