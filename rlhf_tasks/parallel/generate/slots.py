"""The sequences that are decoded together: finished ones leave, waiting ones enter."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.generate.kv_cache import (
    DecodeGraphs,
    Entry,
    KVCache,
    Piece,
    vacate,
)
from prefect_rlhf.rlhf_tasks.parallel.generate.relay import Relay
from prefect_rlhf.rlhf_tasks.parallel.generate.sampling import (
    SamplingParams,
    follow,
    sample,
    states_after,
    uniform,
)
from prefect_rlhf.rlhf_tasks.parallel.layout.work import (
    REFILL_SHARE,
    blocks_of,
    pool_of,
    rows_of,
    shared_blocks,
    slots_of,
)
from prefect_rlhf.rlhf_tasks.parallel.model.logprobs import KeptTokens
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
    record_kept     whether to record which tokens could be drawn
    micro_batches   the cache of a group has this part of the room that all its sequences may take at once
    prefill_tokens  most tokens of a pass over prompts
    on_ended        gets the id of each sample that has ended, and what was drawn of it
    """

    params: SamplingParams
    seed: int
    purpose: str
    segment_tokens: int | None
    record_kept: bool
    micro_batches: int
    prefill_tokens: int
    on_ended: Callable[[int, Sequence[int]], None] | None = None


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
    kept       of each, token after token, which tokens could be drawn (`KeptTokens.listed`); None unless recorded
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
        self.kept: list[list[tuple[int, Tensor]]] | None = (
            [[] for _ in lengths] if drawing.record_kept else None
        )

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
    """The sequences that wait, and what each enters with, by place.

    tokens    [..] int64 each: those that are read. First the prompt; in a later segment also what was drawn here
    drawn     how many of these were drawn here
    like      a number that those with the same tokens have in common
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

    def line_up(self, places: Sequence[int], before: Tensor, strings: Tensor | None) -> None:
        """Let sequences wait. before: as in `Responses`; strings: their table"""
        self.last = torch.stack([tokens[-1] for tokens in self.tokens])
        drawn = list(map(add, before.tolist(), self.drawn))
        self.matched = torch.zeros_like(before)
        if strings is not None and any(drawn):
            texts = [tokens[len(tokens) - n :] for tokens, n in zip(self.tokens, drawn, strict=True)]
            self.matched = states_after(strings, texts)
        self.waiting = deque(places)

    def admit(self, count: int) -> None:
        """Let the first ones enter at the next step."""
        self.entering = [self.waiting.popleft() for _ in range(count)]

    def come_back(self, place: int, drawn: Tensor, matched: Tensor) -> None:
        """Let a sequence that has left before its end wait before all others. drawn: the tokens drawn of it in all;
        matched [] int64: the state of stop strings"""
        prompt = self.tokens[place][: len(self.tokens[place]) - self.drawn[place]]
        self.like[place] = ~place  # as no other: those that it shared a prompt with are still alike
        self.drawn[place] = len(drawn)
        self.tokens[place] = torch.cat([prompt, drawn])
        self.last[place] = self.tokens[place][-1]
        self.matched[place] = matched
        self.waiting.appendleft(place)


@dataclass
class Rows:
    """The sequences that are decoded. Each list and tensor has an entry per row.

    places    the place of each sequence; `order` [rows] int64 is the same on the device
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

    The cache of a group has room for a part of what its sequences may take. As many as fit are decoded at a time.
    Finished ones leave, and waiting ones enter. All of this follows from the tokens alone, so every rank does the
    same without being told.

    A *place* is the number of a sequence in the group. A *row* is the index of a sequence that is decoded.

    How long a response gets is known when it has ended. So sequences enter while those that are decoded have room to
    get as much longer as responses are on average, by those that have ended; before any has, as long as they may.
    Where that is too little, the last places lose their blocks to the first and wait before all others: their prompts
    and tokens are read again, and the tokens that follow are those that would have been drawn. The first place always
    gets on, as the cache has room for one sequence of any length.

    Before a sequence's first step, its prompt is filled into the cache, all but the last token. The first step reads
    that token. A prompt that another row holds already is shared with it; where layers keep states, only with a
    sequence that enters at the same time.

    In segments, a sequence rests when it has the segment's tokens. Where the cache has room for all, all rest at the
    same step, and the next segment continues with rows and cache as they are. Elsewhere a sequence leaves to rest. In
    the next segment it enters again, and its prompt and tokens are read again.

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
        self._stops = torch.tensor(drawing.params.stop_ids, dtype=torch.int64, device=device)
        self._strings = stop_strings and stop_strings.to(device)
        # What changes with the steps:
        self.computed = False
        self.done = False
        self._step = -1  # number of the last step
        self._responses = Responses(prompts, drawing)
        self._rows = Rows.none(device)
        self._queue = Queue(prompts["input_ids"])
        self._queue.line_up(range(len(prompts)), self._responses.before, self._strings)
        shape = engine.layout.shape
        # The last token of a response is never read, so it needs no column.
        lengths, allowed = prompts["input_ids"].lengths, self._responses.allowed
        self._columns = [length + more - 1 for length, more in zip(lengths, allowed, strict=True)]
        blocks = list(map(blocks_of, self._columns))
        again = sum(
            shared_blocks(lengths[first]) * len(others)
            for first, *others in same_prompts(prompts["input_ids"])
        )
        self._cache = KVCache(
            pool_of(sum(blocks) - again, max(blocks), drawing.micro_batches),
            rows_of(len(prompts), drawing.micro_batches, shape.keeps_states),
            max(self._columns),
            device,
            self._pace.span_multiple,
            self._pace.check_every,
        )
        # A pass of experts may wait for the numbers of their tokens, which a graph cannot; and the step that runs
        # before a capture would change states twice.
        graphs = self._pace.graphs and not (shape.experts or shape.keeps_states)
        self._graphs = DecodeGraphs(self._stage, self._cache) if graphs else None
        # Whether a token was drawn from no distribution. It stays on the device until the next check, as a look at it
        # would wait for the device.
        self._unsound = torch.zeros((), dtype=torch.bool, device=device)
        self._running = 0  # sequences that are decoded
        self._ended = 0  # sequences that were
        self._drawn = 0  # tokens of all these
        self._said = set[int]()  # places of those of which `on_ended` knows
        self._admit(self._fitting(0))

    def compute(self) -> None:
        """Run this rank's stage for the next step, on each row's newest token; before, on the prompts that enter."""
        if self._queue.entering:
            self._enter()
        self._step += 1
        self.computed = True
        self._drawn += self._running
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
            for place, of_row in zip(
                self._rows.places, KeptTokens.listed(draw.kept, vocabulary), strict=True
            ):
                responses.kept[place].append(of_row)
        self._relay.share_tokens(draw.tokens)

    def _enter(self) -> None:
        """Fill the prompts of the sequences that enter into the next rows, each prompt once."""
        queue = self._queue
        first = self._cache.rows
        lengths = [len(queue.tokens[place]) - 1 for place in queue.entering]
        self._rows.enter(queue, self._step + 1)
        places = self._rows.places
        filled = {}  # prompt -> the first row with it
        # A state is that after the newest token: only sequences that enter together have the same.
        since = first if self._stage.layout.shape.keeps_states else 0
        alike = [
            (filled.setdefault(queue.like[place], row), row)
            for row, place in enumerate(places[since:], since)
        ]
        sources = [source if source < row else None for source, row in alike[first - since :]]
        self._cache.enter(
            [
                Entry(length, self._columns[place], source)
                for length, place, source in zip(lengths, queue.entering, sources, strict=True)
            ]
        )
        to_fill = [length if source is None else 0 for length, source in zip(lengths, sources, strict=True)]
        for pieces in passes(to_fill, first, self._drawing.prefill_tokens):
            self._fill(pieces, [places[piece.row] for piece in pieces])
        self._cache.share()
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
            if self._drawing.on_ended is not None:
                self._say_ended(finished, self._drawing.on_ended)
            self._turn_over(finished)

    def ended(self) -> list[int]:
        """The ids of the samples that have ended: none of their tokens is still to be drawn."""
        return [sample for sample, ended in zip(self._ids, self._responses.ended(), strict=True) if ended]

    def _say_ended(self, finished: Sequence[bool], on_ended: Callable[[int, Sequence[int]], None]) -> None:
        """Say which samples have ended since the last check. finished: by row, also of those that rest"""
        ended = self._responses.ended()
        for place, is_finished in zip(self._rows.places, finished, strict=True):
            if is_finished and ended[place] and place not in self._said:
                self._said.add(place)
                on_ended(self._ids[place], self.drawn(place).tolist())

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
        room_for_all = slots_of(len(self._ids), self._drawing.micro_batches) == len(self._ids)
        if not room_for_all:
            for place in running:
                queue.like[place] = place
                queue.drawn[place] = drawn[place]
                tokens = responses.tokens[place, : drawn[place]]
                queue.tokens[place] = torch.cat([self._prompts[place], tokens])
            queue.line_up(running, responses.before, self._strings)
        leaves = [not room_for_all or ended[place] for place in self._rows.places]
        self._rows.finished = torch.tensor(leaves, dtype=torch.bool, device=self._device)
        self._part_with(leaves)
        self._running = leaves.count(False)
        self._admit(self._fitting(self._running))
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
        running, queue = finished.count(False), self._queue
        self._ended += self._running - running
        self._running = running
        self.done = running + len(queue.waiting) == 0
        if self.done:  # all rows stay: the next segment may continue with them
            return
        leaves = self._part_with(finished)
        self._running = leaves.count(False)
        count = self._fitting(self._running) if self._running == running else 0
        self._admit(count if running == 0 or count >= max(1, running // REFILL_SHARE) else 0)
        self._leave(leaves)

    def _part_with(self, finished: list[bool]) -> list[bool]:
        """Take the room of finished sequences away and give the others room for their next steps, those at the first
        places first. The last ones may have to leave. Returns which rows leave."""
        rows, queue, leaves = self._rows, self._queue, list(finished)
        self._cache.release([row for row, ended in enumerate(finished) if ended])
        running = [row for row, ended in enumerate(finished) if not ended]
        for row in self._cache.extend(sorted(running, key=rows.places.__getitem__)):
            place, count = rows.places[row], self._step + 1 - rows.started[row]
            queue.come_back(place, self._responses.tokens[place, :count], rows.matched[row])
            leaves[row] = True
        return leaves

    def _fitting(self, running: int) -> int:
        """How many of those that wait may enter, so that all have room until they are as long as is expected."""
        queue, cache = self._queue, self._cache
        if not queue.waiting:
            return 0
        # Tokens that each is expected to get yet: those of a response on average, and those until the next check.
        more = (
            max(self._pace.check_every, -(-self._drawn // self._ended)) if self._ended else max(self._columns)
        )

        def expected(place: int, length: int) -> int:
            return blocks_of(min(self._columns[place], length + more))

        room, present = cache.blocks.free, set[int]()
        for place, length, blocks in zip(self._rows.places, cache.lengths, cache.blocks.rows, strict=True):
            if blocks:  # it does not leave
                room -= max(0, expected(place, length) - len(blocks))
                present.add(queue.like[place])
        if self._stage.layout.shape.keeps_states:
            present.clear()
        count, most = 0, cache.most_rows - running
        for place in queue.waiting:
            length = len(queue.tokens[place]) - 1
            room -= expected(place, length)
            if queue.like[place] in present:
                room += shared_blocks(length + 1)
            if room < 0 or count == most:
                break
            present.add(queue.like[place])
            count += 1
        return count

    def _admit(self, count: int) -> None:
        self._queue.admit(count)
        self._running += count

    def _leave(self, leaves: list[bool]) -> None:
        """The sequences that leave do, but for finished ones that fill the rows of a captured graph."""
        running = leaves.count(False)
        compact = self._graphs is None or self._queue.entering or self._queue.waiting
        stay = running if compact else DecodeGraphs.rows_for(running)
        if stay >= len(leaves):
            return
        rows = vacate(leaves, stay)
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
                counts, ids = zip(*responses.kept[place][:length], strict=True)
                data["kept_counts"] = torch.tensor([0] * len(prompt) + list(counts), dtype=torch.int32)
                data["kept_tokens"] = torch.cat(ids)
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
