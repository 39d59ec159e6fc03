"""The sequences that are decoded together: finished ones leave, waiting ones enter."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.generate.kv_cache import DecodeGraphs, Entry, KVCache, Piece, vacate
from prefect_rlhf.rlhf_tasks.parallel.generate.places import (
    Drawing,
    Queue,
    Responses,
    Rows,
    StopSets,
    same_prompts,
)
from prefect_rlhf.rlhf_tasks.parallel.generate.relay import Relay
from prefect_rlhf.rlhf_tasks.parallel.generate.sampling import sample
from prefect_rlhf.rlhf_tasks.parallel.generate.turns import Following, Listener
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

    With turns, a sequence leaves when its turn has ended, and others enter. It parks its blocks. When it has been
    answered, it waits before those that are yet to begin, and enters with what it has parked: only what is new is
    read. Others take what is parked where they have no room without it, and layers with states park nothing: such a
    sequence is read again. The head alone talks to partners. At a check it says what has been answered, so all ranks
    do the same. In segments, each of which is a turn of all, all rest when they have been answered, and continue with
    what they have parked. Where a prompt is empty, the place waits until partners begin a sequence there; later they
    may begin another. One with the same tokens as another that waits, or as one had when it entered, shares them.

    prompts  with four keys. `input_ids`: prompts, followed by the tokens that earlier calls have drawn after them;
             these count as prompt here. BEFORE [1] int64: how many tokens that are. BEGUN [1] int64: the iteration
             whose random numbers the sequence has. MOST [1] int64: tokens that may be drawn, those before included

    computed  whether a step was computed, or answers were shared, that are not stored yet
    done      whether all sequences have finished, or rest until the next segment
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
        self._places = {sample: place for place, sample in enumerate(prompts.ids)}
        self._partners = drawing.turns and drawing.turns.partners
        self._prompts = prompts["input_ids"].split()
        self._stops = torch.tensor(drawing.params.stop_ids, dtype=torch.int64, device=device)
        self._strings = stop_strings and StopSets(stop_strings, len(prompts), device)
        # What changes with the steps:
        self.computed = False
        self.done = False
        self._step = -1  # number of the last step
        self._responses = Responses(prompts, drawing)
        self._rows = Rows.none(device)
        self._queue = Queue(prompts["input_ids"])
        lengths, allowed = prompts["input_ids"].lengths, self._responses.allowed
        begun = [place for place, length in enumerate(lengths) if length]
        self._queue.line_up(begun, self._responses.before, self._strings)
        self._apart = set(range(len(prompts))).difference(begun)  # places that are between two turns
        self._unanswered = set(self._apart)  # those of them that wait for an answer
        self._asks = False  # whether answers were shared in the last step
        shape = engine.layout.shape
        # The last token of a response is never read, so it needs no column.
        self._columns = [length + more - 1 for length, more in zip(lengths, allowed, strict=True)]
        blocks = list(map(blocks_of, self._columns))
        again = sum(
            shared_blocks(lengths[first]) * len(others)
            for first, *others in same_prompts(prompts["input_ids"])
            if lengths[first]
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
        # Of sequences that others took the places of: tokens, drawn ones.
        self.forgotten: list[tuple[int, int]] = []
        self._admit(self._fitting(0))

    @property
    def runs(self) -> bool:
        """Whether sequences are decoded at the next step. If not, all that have not finished wait for answers."""
        return self._running > 0

    def compute(self, wait_s: float = 0.0) -> None:
        """Run this rank's stage for the next step, on each row's newest token; before, on the prompts that enter. At
        a check, take answers too. wait_s: seconds in which the first of them may come"""
        if self._queue.entering:
            self._enter()
        self.computed = True
        if self.runs:
            self._draw()
        at_once = self._drawing.turns is not None and not self._drawing.turns.together
        checks = not self.runs or (at_once and self._is_check(self._step))
        self._asks = checks and bool(self._unanswered)
        if self._asks and self._relay.is_last_stage:
            samples = {self._ids[place] for place in self._unanswered}
            following = [] if self._partners is None else self._partners.answered(samples, wait_s)
            self._relay.share_following(following)
        elif self._unanswered and self._partners is not None and self._is_check(self._step):
            self._partners.answered((), 0.0)  # nobody is taken yet, but their pipes must not fill

    def _is_check(self, step: int) -> bool:
        return (step + 1) % self._pace.check_every == 0

    def _draw(self) -> None:
        self._step += 1
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
        parked = self._cache.blocks.parked
        cached = {place: queue.cached[place] if place in parked else 0 for place in queue.entering}
        if parked:  # those of which as much is new are read in one pass
            new = {place: len(queue.tokens[place]) - columns for place, columns in cached.items()}
            queue.entering.sort(
                key=lambda place: (cached[place] > 0, bool(cached[place]) * new[place], place)
            )
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
                Entry(length, self._columns[place], source, place if cached[place] else None)
                for length, place, source in zip(lengths, queue.entering, sources, strict=True)
            ]
        )
        to_fill = [
            Piece(row, cached[places[row]], length if source is None else 0)
            for row, (length, source) in enumerate(zip(lengths, sources, strict=True), first)
        ]
        for pieces in passes(to_fill, self._drawing.prefill_tokens):
            self._fill(pieces, [places[piece.row] for piece in pieces])
        self._cache.share()
        if self._partners is not None:
            for row, start, stop in to_fill:
                self._partners.begun(self._ids[places[row]], max(0, stop - start))
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
        """Store the tokens drawn in the last step, and what was answered; at a check, find which sequences leave and
        enter."""
        self.computed = False
        checks = self._store(self._relay.receive_tokens(self._cache.rows)) if self.runs else True
        following = self._relay.receive_following() if self._asks else []
        if not checks:
            return
        *finished, unsound = torch.cat([self._rows.finished, self._unsound[None]]).tolist()
        if unsound:
            self._refuse_unsound_logits()
        if self._drawing.on_ended is not None:
            self._say_ended(finished, self._drawing.on_ended)
        if self._drawing.turns is not None and self._drawing.turns.listener is not None:
            self._say_drawn(finished, self._drawing.turns.listener)
        self._turn_over(finished, following)

    def _store(self, tokens: Tensor) -> bool:
        """Store the tokens [rows] int64 of a step. Returns whether it is a check."""
        responses, rows = self._responses, self._rows
        order = rows.order
        most = responses.most_tensor[order]
        responses.tokens[order, rows.drawn] = tokens
        ends = torch.isin(tokens, self._stops)
        if self._strings is not None:
            rows.matched, completed = self._strings.follow(order, rows.matched, tokens)
            ends |= completed & (responses.before[order] + rows.drawn >= self._drawing.params.min_new_tokens)
        ends &= ~rows.finished
        responses.truncated[order] &= ~ends
        responses.lengths[order] = responses.lengths[order].where(~ends, rows.drawn + 1)
        # Finished sequences run until the next check: their tokens beyond the longest response share one column.
        rows.drawn = torch.minimum(rows.drawn + 1, most)
        rows.finished |= ends | (rows.drawn == most)
        rows.newest = tokens
        return self._is_check(self._step) or any(
            self._step + 1 - started == responses.most[place]
            for place, started in zip(rows.places, rows.started, strict=True)
        )

    def ended(self) -> list[int]:
        """The ids of the samples that have ended: none of their tokens is still to be drawn."""
        if self._drawing.turns is not None:
            return [self._ids[place] for place in self._apart - self._unanswered]
        return [sample for sample, ended in zip(self._ids, self._responses.ended(), strict=True) if ended]

    def _say_ended(self, finished: Sequence[bool], on_ended: Callable[[int, Sequence[int]], None]) -> None:
        """Say which samples have ended since the last check. finished: by row, also of those that rest"""
        ended = self._responses.ended()
        for place, is_finished in zip(self._rows.places, finished, strict=True):
            if is_finished and ended[place] and place not in self._said:
                self._said.add(place)
                on_ended(self._ids[place], self.drawn(place).tolist())

    def _say_drawn(self, finished: Sequence[bool], listener: Listener) -> None:
        """Say what was drawn of turns that are listened to and have not ended. finished: by row"""
        if not (listened := listener.listened()):
            return
        responses, rows = self._responses, self._rows
        for place, started, is_finished in zip(rows.places, rows.started, finished, strict=True):
            heard = listened.get(self._ids[place])
            if heard is None or is_finished:
                continue
            new = slice(heard - int(responses.before[place]), self._step + 1 - started)
            if ids := responses.tokens[place, new].tolist():
                listener.drawn(self._ids[place], ids, responses.logprobs[place, new])

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
        if self._drawing.turns is not None:
            self.done = not queue.waiting
            for place in queue.waiting:
                responses.lengths[place] = responses.most[place]
            self._admit(self._fitting(0))
            return
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

    def _turn_over(self, finished: list[bool], following: Sequence[Following] = ()) -> None:
        """Let finished sequences leave and waiting ones enter. finished: by row; following: what was answered"""
        running, queue = finished.count(False), self._queue
        self._ended += self._running - running
        self._running = running
        if self._drawing.turns is not None:
            self._set_apart([row for row, ended in enumerate(finished) if ended])
            self._answer(following)
        self.done = running + len(queue.waiting) + len(self._unanswered) == 0
        if following and self._drawing.segment_tokens is not None:
            self.done = True
            for place in queue.waiting:
                self._responses.lengths[place] = queue.drawn[place]
        if self.done:  # all rows stay: the next segment may continue with them
            return
        leaves = self._part_with(finished)
        self._running = leaves.count(False)
        count = self._fitting(self._running) if self._running == running else 0
        self._admit(count if running == 0 or count >= max(1, running // REFILL_SHARE) else 0)
        self._leave(leaves)

    def _set_apart(self, rows: Sequence[int]) -> None:
        """The turns of some rows have ended: they park their blocks, and their partners hear of it."""
        places = {self._rows.places[row]: row for row in rows}
        new = [place for place in places if place not in self._apart]
        lengths = self._responses.lengths.tolist() if new else []
        for place in new:
            if not self._stage.layout.shape.keeps_states:
                self._cache.park(places[place], place)
            # The last token is not read yet, or is read again:
            self._queue.cached[place] = len(self._prompts[place]) + lengths[place] - 1
            self._apart.add(place)
            self._unanswered.add(place)
            if self._partners is not None:
                self._partners.ended(self._ids[place], self._responses.turn(place))

    def _answer(self, following: Sequence[Following]) -> None:
        """Let those that were answered wait for their next turn, or be over."""
        for answered in following:
            place = self._places[answered.sample]
            self._unanswered.remove(place)
            if not answered.most:
                self._cache.blocks.unpark(place)
                continue
            self._apart.remove(place)
            if answered.anew:
                self._forget(place)
            self._give_strings(place, answered.stop)
            stop = self._responses.observe(place, answered)
            self._queue.come_back(place, self._responses.tokens[place, :stop])
            if answered.anew:
                # One that has parked blocks enters with these: a finished row may still be there.
                others = [*self._rows.places, *self._queue.waiting]
                parked = self._cache.blocks.parked
                self._queue.liken(place, [other for other in others if other not in parked])

    def _give_strings(self, place: int, strings: tuple[str, ...] | None) -> None:
        """Let the turn that begins at a place end with these strings, None being those of the order."""
        assert self._drawing.turns is not None, "a turn begins"
        made, n = self._drawing.turns.stop_strings, len(self._ids)
        if made is None or (strings is None and self._strings is None):
            assert strings is None, "turns have strings of their own"
            return
        if self._strings is None:
            self._strings = StopSets(made(()), n, self._device)
        self._strings.give(place, strings, made, [each for each in range(n) if each not in self._apart])

    def _forget(self, place: int) -> None:
        """Another sequence takes the place of one whose turns are over."""
        length = int(self._responses.lengths[place])
        self.forgotten.append((length, length - int(self._responses.observed[place, :length].sum())))
        self._cache.blocks.unpark(place)

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

        room, present = cache.blocks.free + cache.blocks.reclaimable, set[int]()
        for place, length, blocks in zip(self._rows.places, cache.lengths, cache.blocks.rows, strict=True):
            if blocks:  # it does not leave
                room -= max(0, expected(place, length) - len(blocks))
                present.add(queue.like[place])
        if self._stage.layout.shape.keeps_states:
            present.clear()
        count, most = 0, cache.most_rows - running
        for place in queue.waiting:
            length = len(queue.tokens[place]) - 1
            room -= expected(place, length) - cache.blocks.pinned(place)
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
        tokens, observed = responses.tokens.cpu(), responses.observed.cpu()
        logprobs = responses.logprobs.to("cpu", torch.promote_types(self._stage.dtype, torch.float32))
        samples = {}
        for place, (sample_id, length) in enumerate(zip(self._ids, responses.lengths.tolist(), strict=True)):
            prompt = self._prompts[place].cpu()
            data = {
                "input_ids": torch.cat([prompt, tokens[place, :length]]),
                "response_mask": torch.cat([prompt.new_zeros(len(prompt)).bool(), ~observed[place, :length]]),
                "old_logprobs": torch.cat([logprobs.new_zeros(len(prompt)), logprobs[place, :length]]),
                "truncated": truncated[place : place + 1],
            }
            if (candidates := responses.candidates(place, 0, length)) is not None:
                counts, data["kept_tokens"] = candidates
                data["kept_counts"] = torch.cat([counts.new_zeros(len(prompt)), counts])
            samples[sample_id] = data
        return samples


def passes(pieces: Sequence[Piece], most: int) -> Iterator[list[Piece]]:
    """Cut what is read into passes of at most `most` tokens: several beginnings, several later pieces of one length,
    or a part of a longer piece alone.

    pieces  of sequences, one each; one without tokens is in no pass
    """
    whole, tokens, together = list[Piece](), 0, 0
    for piece in pieces:
        length = piece.stop - piece.first
        if length > most:
            cuts = range(piece.first, piece.stop, most)
            yield from ([Piece(piece.row, at, min(at + most, piece.stop))] for at in cuts)
        elif length > 0:
            alike = length if piece.first else 0
            if whole and (tokens + length > most or alike != together):
                yield whole
                whole, tokens = [], 0
            whole.append(piece)
            tokens, together = tokens + length, alike
    if whole:
        yield whole
