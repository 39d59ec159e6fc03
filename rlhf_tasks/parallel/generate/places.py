"""What is drawn of each sequence of a group, which of them wait, and which are decoded."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.generate.sampling import (
    SamplingParams,
    StopStrings,
    StopTable,
    follow,
    states_after,
    uniform,
)
from prefect_rlhf.rlhf_tasks.parallel.generate.turns import Following, Turn, Turns

KEPT_SETS = 16  # of stop strings stay, though nobody has them now: agents ask with the same ones again

BEFORE = "before"
"""The key of the number of tokens that were drawn of a response before."""

MOST = "most"
"""The key of the most tokens of a response; `max_new_tokens`, where they are the same for all."""

BEGUN = "begun"
"""The key of the iteration whose random numbers a sequence has: that in which it was begun."""


class Drawing(NamedTuple):
    """What is the same for all groups of a generation.

    seed, purpose   of the random numbers
    segment_tokens  most tokens that are drawn of a sequence in a segment; None: as many as a response may have
    record_kept     whether to record which tokens could be drawn
    micro_batches   the cache of a group has this part of the room that all its sequences may take at once
    prefill_tokens  most tokens of a pass over prompts
    turns           how responses are drawn turn by turn; None: at once
    on_ended        gets the id of each sample that has ended, and what was drawn of it
    """

    params: SamplingParams
    seed: int
    purpose: str
    segment_tokens: int | None
    record_kept: bool
    micro_batches: int
    prefill_tokens: int
    turns: Turns | None = None
    on_ended: Callable[[int, Sequence[int]], None] | None = None


class Responses:
    """What is drawn of a group's n sequences, by place. L is the most tokens that are drawn of one, and one more.

    A response of several turns has the observations between them among its tokens.
    before     [n] int64: what is added to the number of a token here to have its number in the response: the tokens
               that earlier calls have drawn. With turns, to have its number in the turn: less those before the turn
    allowed    most tokens of each response
    most       most tokens of each by the end of segment or turn; `most_tensor` [n] int64 is the same on the device
    lengths    [n] int64; while a response runs, its `most`
    truncated  [n] bool: neither a stop id nor a stop string has ended it
    uniforms   [n, L] float64: the random number of each token
    tokens     [n, L] int64. The last column is for what is drawn after the end of the longest response
    logprobs   [n, L] float64; on the last stage alone
    observed   [n, L] bool: True on observations
    kept       of each, token after token, which tokens could be drawn (`KeptTokens.listed`); None unless recorded
    """

    def __init__(self, prompts: SampleBatch, drawing: Drawing) -> None:
        device = prompts["input_ids"].values.device
        lengths = prompts["input_ids"].lengths
        self._drawing, self._read = drawing, lengths
        first_turn = None if drawing.turns is None else drawing.turns.most
        self._segment = first_turn or drawing.segment_tokens or drawing.params.max_new_tokens
        self.before = prompts[BEFORE].values
        self.allowed = (prompts[MOST].values - self.before).tolist()
        self.most = [min(self._segment, allowed) for allowed in self.allowed]
        self.most_tensor = torch.tensor(self.most, device=device)
        self.lengths = self.most_tensor * (torch.tensor(lengths, device=device) > 0)
        self.truncated = torch.ones(len(prompts), dtype=torch.bool, device=device)
        ids = torch.tensor(prompts.ids, device=device)
        numbers = torch.arange(max(self.allowed) + 1, device=device)
        positions = torch.tensor(lengths, device=device)[:, None] + numbers
        self.uniforms = torch.zeros(positions.shape, dtype=torch.float64, device=device)
        self._begun = prompts[BEGUN].values
        for iteration in sorted(set(self._begun.tolist())):
            of = (self._begun == iteration).nonzero().squeeze(1)
            self.uniforms[of] = uniform(
                drawing.seed, drawing.purpose, iteration, ids[of, None], positions[of]
            )
        self.tokens = torch.zeros(self.uniforms.shape, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros_like(self.uniforms)
        self.observed = torch.zeros_like(self.tokens, dtype=torch.bool)
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

    def turn(self, place: int) -> Turn:
        """The turn that has ended at a place."""
        start, stop = -int(self.before[place]), int(self.lengths[place])
        ids, logprobs = self.tokens[place, start:stop].tolist(), self.logprobs[place, start:stop]
        return Turn(ids, bool(self.truncated[place]), logprobs, self.candidates(place, start, stop))

    def candidates(self, place: int, start: int, stop: int) -> tuple[Tensor, Tensor] | None:
        """(`kept_counts`, `kept_tokens`) of some tokens of a response; None where they are not recorded."""
        if self.kept is None:
            return None
        listed = self.kept[place][start:stop]
        counts = torch.tensor([count for count, _ in listed], dtype=torch.int32)
        return counts, torch.cat([torch.zeros(0, dtype=torch.int32), *(ids for _, ids in listed)])

    def observe(self, place: int, following: Following) -> int:
        """Let a response whose turn has ended have an observation, and then a turn. Returns its length before that
        turn."""
        ids = following.ids
        start = 0 if following.anew else int(self.lengths[place])
        stop = start + len(ids)
        most = min(stop + following.most, self.allowed[place])
        if following.number is not None:
            positions = torch.arange(stop, most, device=self.tokens.device) + self._read[place]
            whose = torch.full_like(positions, following.number)
            drawing, iteration = self._drawing, int(self._begun[place])
            self.uniforms[place, stop:most] = uniform(
                drawing.seed, drawing.purpose, iteration, whose, positions
            )
        self.tokens[place, start:stop] = torch.tensor(ids, dtype=torch.int64, device=self.tokens.device)
        self.logprobs[place, start:stop] = 0
        self.observed[place, start:] = False
        self.observed[place, start:stop] = True
        if self.kept is not None:
            none = torch.zeros(0, dtype=torch.int32)
            self.kept[place][start:] = [(0, none)] * len(ids)
        self.before[place] = -stop
        self.most[place] = most
        self.most_tensor[place] = self.lengths[place] = most
        self.truncated[place] = True
        return stop


class Queue:
    """The sequences that wait, and what each enters with, by place.

    tokens    [..] int64 each: those that are read. First the prompt; in a later segment or turn also what came after
    drawn     how many of these came after it
    cached    how many of these are in the blocks that it has parked, if it still has any
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
        self.cached = [0] * n
        self.like = {place: alike[0] for alike in same_prompts(prompts) for place in alike}
        self._unlike = count(n)
        self.last = torch.zeros(n, dtype=torch.int64, device=prompts.values.device)
        self.matched = torch.zeros_like(self.last)
        self.waiting = deque[int]()
        self.entering: list[int] = []

    def line_up(self, places: Sequence[int], before: Tensor, strings: "StopSets | None") -> None:
        """Let sequences wait. before: as in `Responses`; strings: of the order"""
        for place in places:
            self.last[place] = self.tokens[place][-1]
        drawn = list(map(add, before.tolist(), self.drawn))
        self.matched = torch.zeros_like(before)
        if strings is not None and any(drawn):
            texts = [tokens[len(tokens) - n :] for tokens, n in zip(self.tokens, drawn, strict=True)]
            self.matched = states_after(strings.table, texts)
        self.waiting = deque(places)

    def admit(self, count: int) -> None:
        """Let the first ones enter at the next step."""
        self.entering = [self.waiting.popleft() for _ in range(count)]

    def come_back(self, place: int, drawn: Tensor, matched: Tensor | int = 0) -> None:
        """Let a sequence that has left before its end wait before those that are yet to begin, in the order of the
        places. drawn: all tokens after its prompt; matched [] int64: the state of stop strings"""
        prompt = self.tokens[place][: len(self.tokens[place]) - self.drawn[place]]
        self.like[place] = next(self._unlike)  # those that it shared a prompt with are still alike
        self.drawn[place] = len(drawn)
        self.tokens[place] = torch.cat([prompt, drawn])
        self.last[place] = self.tokens[place][-1]
        self.matched[place] = matched
        self.waiting = deque(sorted([*self.waiting, place], key=lambda each: (not self.drawn[each], each)))

    def liken(self, place: int, others: Sequence[int]) -> None:
        """Let a sequence be alike to one of some others that has the same tokens, if there is one."""
        for other in others:
            if other != place and torch.equal(self.tokens[other], self.tokens[place]):
                self.like[place] = self.like[other]
                return


class StopSets:
    """The stop strings of a group's n sequences. Each has those of the order, unless its turn has others: one look-up
    follows all, whatever they are.

    table  of the sets that are in use, and of some that were
    """

    def __init__(self, strings: StopStrings, n: int, device: torch.device) -> None:
        self._sets: list[tuple[tuple[str, ...] | None, StopStrings]] = [(None, strings)]
        self._of = torch.zeros(n, dtype=torch.int64, device=device)  # the number of each one's set
        self.table = strings.to(device)

    def follow(self, order: Tensor, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """As `sampling.follow`. order: the places of the rows"""
        return follow(self.table, states, tokens, self._of[order])

    def give(
        self,
        place: int,
        strings: tuple[str, ...] | None,
        made: Callable[[tuple[str, ...]], StopStrings],
        running: Sequence[int],
    ) -> None:
        """Let a turn that begins have these strings, None being those of the order.

        made     makes a set
        running  the places of all turns that have not ended
        """
        names = [name for name, _ in self._sets]
        if strings not in names:
            assert strings is not None, "the order's are there"
            used = {0, *self._of[list(running)].tolist()}
            free = [number for number in range(len(names)) if number not in used]
            if len(names) < KEPT_SETS or not free:
                self._sets.append((strings, made(strings)))
                names.append(strings)
            else:
                self._sets[free[0]], names[free[0]] = (strings, made(strings)), strings
            self.table = StopTable.of([each for _, each in self._sets], self._of.device)
        self._of[place] = names.index(strings)


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


def same_prompts(prompts: Packed) -> list[list[int]]:
    """The places of the sequences with each prompt, in the order in which prompts come first."""
    places_of: dict[tuple[int, ...], list[int]] = {}
    for place, prompt in enumerate(prompts.to(torch.device("cpu")).split()):
        places_of.setdefault(tuple(prompt.tolist()), []).append(place)
    return list(places_of.values())
