"""Responses of agents, the user's own programs, which ask the policy through an endpoint (docs/adr/0043).

What an agent asks and is answered is recorded as tokens. A request that begins with an earlier one and its answer
continues their tokens: they are read as they were drawn, never tokenised again. Any other request begins a new
*chain*. All chains of an episode are one sample: its sequences, in which each drawn token counts once.

Only the head knows requests. They are turns of one generation (turns.py): one that continues a chain follows where
that was drawn, others begin in places that are free. An engine that draws one turn at a time draws those together
that wait at the same time and have the same stop strings. Random numbers belong to the sample and to the number of
its request, so an agent that asks one thing after the other draws the same whatever the layout; when requests come
together is up to the agents.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.algorithms.shared.chains import (
    Chain,
    followed,
    joined,
    read_up_to,
    sequences,
)
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext
from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import (
    AGENT_COLUMNS,
    AGENT_COUNTS,
    ENVIRONMENT_FAULT,
    ENVIRONMENT_REWARDS,
)
from prefect_rlhf.rlhf_tasks.algorithms.shared.spoken import Spoken, after, until
from prefect_rlhf.rlhf_tasks.config.responses import MOST_REQUESTS
from prefect_rlhf.rlhf_tasks.config.sampling import Scores
from prefect_rlhf.rlhf_tasks.data.chat_template import TokenizerError
from prefect_rlhf.rlhf_tasks.data.tokenizer import Tokenizer
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import broadcast_json
from prefect_rlhf.rlhf_tasks.parallel.generate.generator import Order
from prefect_rlhf.rlhf_tasks.parallel.generate.sampling import StopStrings
from prefect_rlhf.rlhf_tasks.parallel.generate.turn_by_turn import turn_by_turn
from prefect_rlhf.rlhf_tasks.parallel.generate.turns import Following, Turn, Turns
from prefect_rlhf.rlhf_tasks.parallel.layout.transfers import LENGTHS
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from prefect_rlhf.rlhf_tasks.system.counter_random import counter_bits
from prefect_rlhf.rlhf_tasks.system.interruption import leave_if_ended
from prefect_rlhf.rlhf_tasks.user_code.agents.chat_api import RAW, Asked, Choice, Drawing, Refused
from prefect_rlhf.rlhf_tasks.user_code.agents.process import AgentProcess, Ended
from prefect_rlhf.rlhf_tasks.user_code.agents.streams import Piece
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError

WAIT_S = 0.5  # at most, that a head waits for a request until it tells the other ranks that it is there
STREAM_EVERY_S = 0.02  # that streamed answers are told further, at most
GATHER_S = 0.05  # that a request waits for others, where they are drawn together with it or after it
COUNTS = ("requests", "refused", "branches", "left_out")
"""What is counted of an episode: answers it has asked for, requests that were refused, sequences of its sample, drawn
tokens of those for which the sample had no room."""


def play_agents(
    engine: Engine,
    batch: SampleBatch,
    context: CallContext,
    order: Order,
    stop_table: Callable[[Tokenizer, tuple[str, ...]], StopStrings],
) -> SampleBatch | None:
    """The samples of agents, by the keys of `generation.draw` and AGENT_COUNTS, on the head; None elsewhere.

    order       how all answers are drawn; a request may have fewer tokens, and further stop strings
    stop_table  makes what finds stop strings
    Collective over the replica. Raises RewardError, naming the sample, where an agent fails; with `on_reward_error:
    skip` its sample says so under ENVIRONMENT_FAULT, and has an end token where nothing was drawn.
    """
    dp, draw = engine.coordinate.dp, context.generator.draw
    head, replica = engine.placement.heads[dp], engine.groups[engine.placement.replica(dp)]
    # A user's own engine may be older than turns.
    draws_turns = getattr(context.generator, "draws_turns", False)
    if not draws_turns:
        draw = partial(turn_by_turn, engine, draw)
    episodes = _Episodes(engine, batch, context, order, draws_turns) if engine.is_head else None
    empty = torch.zeros(0, dtype=torch.int64, device=engine.device)
    places = SampleBatch(batch.ids, {"prompt_ids": Packed(empty, (0,) * len(batch))})
    try:
        while True:
            leave_if_ended()
            stated = broadcast_json(episodes and episodes.next(), head, replica, engine.device)
            if stated is None:
                break
            if not stated:  # no request has come: the other ranks need not think that their head is lost
                continue
            most, strings = stated["most"], tuple(stated["stop"])
            params = replace(
                order.params,
                max_new_tokens=most,
                min_new_tokens=min(order.params.min_new_tokens, most),
                stop_strings=stop_table(context.tokenizer, strings) if strings else None,
            )
            turns = Turns(
                most, episodes, listener=episodes, stop_strings=partial(stop_table, context.tokenizer)
            )
            draw(places, order._replace(params=params, stop_strings=strings, turns=turns))
        return None if episodes is None else episodes.samples()
    finally:
        if episodes is not None:
            episodes.close()


class _Draw(NamedTuple):
    """An answer that is to be drawn.

    number   of it, among all of its episode
    choice   its number among those to its request
    request  that it answers
    base     the chain that it continues
    context  what is drawn from, as `Chain.data`
    most     tokens
    stop     strings
    """

    number: int
    choice: int
    request: Asked
    base: Chain | None
    context: Mapping[str, Tensor]
    most: int
    stop: tuple[str, ...]


class _Streamed:
    """An answer that is told while it is drawn. heard: how many of its tokens were"""

    def __init__(self, draw: _Draw, tokenizer: Tokenizer) -> None:
        self.heard, self._draw, self._tokenizer = 0, draw, tokenizer
        before = draw.context["input_ids"].tolist()
        self._text = Spoken(tokenizer, before, draw.stop, special_tokens=False)
        self._raw = Spoken(tokenizer, before, draw.stop, special_tokens=True) if draw.request.tools else None

    def piece(self, ids: Sequence[int], logprobs: Tensor) -> tuple[int, Piece]:
        """(number of the request, what further tokens say)"""
        self.heard += len(ids)
        raw = "" if self._raw is None else self._raw.add(ids)
        tokens = [self._tokenizer.decode([each], special_tokens=True) for each in ids]
        return self._draw.request.number, Piece(
            self._draw.choice, self._text.add(ids), raw, tokens, logprobs.tolist()
        )


@dataclass
class _Episode:
    """A sample on its head.

    prompt  of its row
    chains  by the numbers of their own answers
    drawn   tokens, of all chains
    draws   that were begun: the next one's number
    ended   how; None while it runs
    """

    prompt: Tensor
    chains: dict[int, Chain] = field(default_factory=dict)
    drawn: int = 0
    draws: int = 0
    ended: Ended | None = None


class _Episodes:
    """The episodes of a head: the partners of generation, and its listener. Where that draws turns, requests enter
    while others are drawn; else a draw has those that have come before it, and no others."""

    def __init__(
        self, engine: Engine, batch: SampleBatch, context: CallContext, order: Order, draws_turns: bool
    ) -> None:
        config = context.config
        assert isinstance(config, Scores), "the configuration has agents"
        assert config.agent is not None, "the configuration has agents"
        self._engine, self._context, self._config, self._order = engine, context, config, order
        self._draws_turns, self._at_once = draws_turns, config.agent.at_once
        prompts = batch["prompt_ids"].to(torch.device("cpu")).split()
        self._of = {sample: _Episode(prompt) for sample, prompt in zip(batch.ids, prompts, strict=True)}
        ids = torch.tensor(batch.ids, dtype=torch.int64)
        seeds = counter_bits(
            config.seed, f"agent/{order.purpose}", context.iteration, ids, torch.zeros(1, dtype=torch.int64)
        )
        self._begin = list(zip(batch.ids, batch["columns"].texts(), seeds.tolist(), strict=True))
        self._answers: list[tuple[int, dict[str, Any]]] = []
        self._choices: dict[int, dict[int, Choice]] = {}  # by the numbers of requests, and of answers
        self._draws: dict[int, _Draw] = {}  # that wait, by the ids that they are drawn by
        self._now: dict[int, _Draw] = {}  # that are drawn, by places
        self._parked: dict[int, Chain | None] = {}  # what other places have, those used last at the end
        self._streamed: dict[int, _Streamed] = {}  # those of them that are, by places
        self._streamed_s = 0.0  # time.monotonic() when these were told last
        self._stop = order.stop_strings  # of the draw
        self._closes = False  # whether nothing enters any more
        drawing = Drawing(order.params.temperature, order.params.top_p)
        self._process = AgentProcess(
            config, config.agent, drawing, context.run_folder, context.iteration, order.params.max_new_tokens
        )

    @property
    def _returns_columns(self) -> bool:
        return self._config.agent is not None and self._config.agent.rollout is not None

    @property
    def _running(self) -> int:
        return sum(episode.ended is None for episode in self._of.values())

    def next(self) -> dict[str, Any] | None:
        """The `most` tokens and the `stop` strings of the draw that comes next, {} where nothing has been asked for
        yet; None where all episodes have ended."""
        if not self._running:
            return None
        self._hear(0.0 if self._draws else WAIT_S)
        until_s = time.monotonic() + (0.0 if self._draws_turns else GATHER_S)
        while 0 < self._waiting() < min(self._running, self._at_once) and time.monotonic() < until_s:
            self._hear(until_s - time.monotonic())
        if not self._draws:
            return {}
        if not self._draws_turns:
            self._stop = next(iter(self._draws.values())).stop
        self._parked, self._closes = dict.fromkeys(self._of), False
        return {"most": max(map(self._most, self._of.values())), "stop": self._stop}

    def _waiting(self) -> int:
        return len({draw.request.sample for draw in self._draws.values()})

    def _hear(self, wait_s: float) -> None:
        """Take what has come from agents; wait for the first of it, for so many seconds at most."""
        begin, self._begin = self._begin, []
        try:
            if begin:
                self._process.tell(begin)
            requests, ended = self._process.heard(wait_s)
        except RewardError as error:
            if self._config.on_reward_error != "skip":
                raise
            running = [sample for sample, episode in self._of.items() if episode.ended is None]
            requests, ended = [], [Ended(each, None, f"was lost: {error}", 0, 0) for each in running]
        for request in requests:
            self._receive(request)
        for each in ended:
            self._end(each)
        self._send()

    def _send(self) -> None:
        if self._answers and self._running:
            self._process.tell(answers=self._answers)
        self._answers = []

    def begun(self, sample: int, read: int) -> None:
        """Nothing follows from it."""

    def ended(self, sample: int, turn: Turn) -> None:
        """An answer was drawn: a request may have all of its answers now. What an agent that has ended did not get is
        no part of its episode."""
        draw = self._now.pop(sample)
        self._streamed.pop(sample, None)
        has_ended = self._of[draw.request.sample].ended is not None
        self._parked[sample] = None if has_ended else self._take(draw, turn)
        self._send()

    def answered(self, samples: Collection[int], wait_s: float) -> list[Following]:
        """The requests that enter in these places. An engine that draws one turn at a time draws those that have come
        first, while stop strings are the same; the next draw has the others. Else a draw ends when all episodes
        have."""
        self._hear(0.0 if self._draws or self._closes else wait_s)
        following = []
        draws = list(self._draws.items())
        if not self._draws_turns:
            draws = list(takewhile(lambda each: each[1].stop == self._stop, draws))
        for number, draw in () if self._closes else draws:
            if (place := self._place(draw, samples)) is not None:
                base, ids = self._parked.pop(place), draw.context["input_ids"].tolist()
                anew = base is None or base is not draw.base
                self._now[place] = self._draws.pop(number)
                if draw.request.stream:
                    self._streamed[place] = _Streamed(draw, self._context.tokenizer)
                new = ids[0 if base is None or anew else base.length :]
                stop = None if draw.stop == self._stop else draw.stop
                following.append(Following(place, new, draw.most, number, anew, stop))
        is_over = not self._draws_turns or not (self._draws or self._running)
        self._closes |= not self._now and is_over
        return list(map(Following, samples)) if self._closes else following

    def listened(self) -> Mapping[int, int]:
        """The places of answers that are streamed, at times."""
        now_s = time.monotonic()
        if not self._streamed or now_s - self._streamed_s < STREAM_EVERY_S:
            return {}
        self._streamed_s = now_s
        return {place: streamed.heard for place, streamed in self._streamed.items()}

    def drawn(self, sample: int, ids: Sequence[int], logprobs: Tensor) -> None:
        """Tell a part of an answer that is streamed."""
        if self._of[self._now[sample].request.sample].ended is None:
            recorded = logprobs.to("cpu", self._engine.dtype_of_rows)
            self._process.tell(pieces=[self._streamed[sample].piece(ids, recorded)])

    def _place(self, draw: _Draw, samples: Collection[int]) -> int | None:
        """The place of these in which a draw enters: where its chain is parked; else one whose chain none continues
        any more, or that was used the longest ago. None where there is none now."""
        for place, chain in self._parked.items():
            if chain is not None and chain is draw.base:
                return place if place in samples else None

        def is_needed(place: int) -> bool:
            chain = self._parked[place]
            return chain is not None and self._of[chain.request.sample].ended is None

        return min((place for place in self._parked if place in samples), key=is_needed, default=None)

    def _end(self, ended: Ended) -> None:
        """An agent has ended: what it still waits for is not drawn."""
        episode = self._of[ended.sample]
        is_scored = bool(self._config.scoring_rewards) or self._config.scoring_role == "reward"
        fault = ended.fault
        if not fault and not episode.chains:
            fault = "asked the policy for nothing"
        if not fault and ended.reward is None and not is_scored:
            lacks = 'the last line of its output is no {"reward": NUMBER}'
            if self._returns_columns:
                lacks = "it returned no env_reward"
            fault = f"gave no reward: {lacks}, and the run has no rewards"
        if fault and self._config.on_reward_error != "skip":
            where = self._context.where(ended.sample)
            raise RewardError(f"{self._named(fault)} It was at sample {ended.sample} ({where}).")
        episode.ended = ended._replace(fault=fault and self._named(fault))
        self._draws = {
            number: draw for number, draw in self._draws.items() if number // MOST_REQUESTS != ended.sample
        }

    def _named(self, fault: str) -> str:
        assert self._config.agent is not None, "the configuration has agents"
        return f"agent {self._config.agent.command}: it {fault.rstrip('.')}."

    def _receive(self, request: Asked) -> None:
        """Make a request's draws, or refuse it."""
        episode = self._of[request.sample]
        if episode.ended is not None:  # its body came late
            return
        try:
            base, ids = self._read_tokens(request, episode) if request.ids else self._read(request, episode)
        except (TokenizerError, Refused) as error:
            code = error.code if isinstance(error, Refused) else "invalid_value"
            self._refuse(request, str(error), code)
            return
        length = len(ids) + (0 if base is None else base.length)
        room = self._most(episode) - length
        most = room if request.most is None else request.most
        if not length or most > room or room < 1:
            asks = "no token" if not length else f"{length} tokens, and asks for {max(most, 1)} more"
            self._refuse(request, *self._too_long(asks, episode))
            return
        strings = tuple(dict.fromkeys((*self._order.stop_strings, *request.stop)))
        before = {} if base is None else base.data
        context = followed(before, ids, self._engine.dtype_of_rows)
        self._choices[request.number] = {}
        for choice in range(request.n):
            number = episode.draws + choice
            draw = _Draw(number, choice, request, base, context, most, strings)
            self._draws[request.sample * MOST_REQUESTS + number] = draw
        episode.draws += request.n

    def _most(self, episode: _Episode) -> int:
        """Tokens that a sample has at most."""
        return len(episode.prompt) + self._order.params.max_new_tokens

    def _too_long(self, asks: str, episode: _Episode) -> tuple[str, str]:
        return (
            f"the request has {asks}; a sample has at most {self._most(episode)}: those of the row's prompt, and "
            f"sampling.max_completion_length={self._order.params.max_new_tokens}",
            "context_length_exceeded",
        )

    def _read(self, request: Asked, episode: _Episode) -> tuple[Chain | None, list[int]]:
        """(the chain that a request continues, the tokens that it adds). Raises TokenizerError and Refused."""
        tokenizer, most = self._context.tokenizer, self._most(episode)

        def encode(text: str, special_tokens: bool = False) -> list[int]:
            if len(text) > most * tokenizer.longest:  # that takes no time to see, and megabytes take seconds
                raise Refused(400, *self._too_long(f"{len(text):,} characters", episode))
            return tokenizer.encode(text, special_tokens)

        def render(messages: Sequence[Mapping[str, Any]]) -> str:
            (text,) = tokenizer.render(
                [([_plain(each, tokenizer) for each in messages], True, request.tools)]
            )
            return text

        ends = [tokenizer.decode([end], special_tokens=True) for end in tokenizer.stop_ids]
        for chain in sorted(episode.chains.values(), key=lambda chain: (-chain.length, chain.line)):
            if (rest := chain.rest(request, render, ends)) is not None:
                return chain, encode(rest)
        if request.messages is None:
            return None, encode(request.text, special_tokens=True)
        return None, encode(render(request.messages))

    def _read_tokens(self, request: Asked, episode: _Episode) -> tuple[Chain | None, list[int]]:
        """The same of a request in tokens, which continues that of which it has all tokens."""
        ids, size = list(request.ids), self._context.tokenizer.size
        if (largest := max(ids)) >= size:
            raise Refused(400, f"prompt: the tokenizer has no token {largest}, only {size}")
        for chain in sorted(episode.chains.values(), key=lambda chain: (-chain.length, chain.line)):
            if chain.data["input_ids"].tolist() == ids[: chain.length]:
                return chain, ids[chain.length :]
        return None, ids

    def _refuse(self, request: Asked, sentence: str, code: str) -> None:
        self._answers.append((request.number, {"refused": sentence, "code": code}))

    def _take(self, draw: _Draw, turn: Turn) -> Chain:
        """Record an answer."""
        new = {
            "input_ids": torch.tensor(turn.ids, dtype=torch.int64),
            "response_mask": torch.ones(len(turn.ids), dtype=torch.bool),
            "old_logprobs": turn.logprobs.to("cpu", self._engine.dtype_of_rows),
        }
        if turn.candidates is not None:
            new |= dict(zip(("kept_counts", "kept_tokens"), turn.candidates, strict=True))
        choice, tail = self._choice(draw, new, turn.is_cut)
        episode = self._of[draw.request.sample]
        episode.drawn += len(turn.ids)
        line, count = ((), 0) if draw.base is None else (draw.base.line, draw.base.drawn)
        chain = Chain(
            draw.request,
            said=(choice.raw, choice.text),
            tail=tail,
            data=joined(draw.context, new),
            line=(*line, draw.number),
            drawn=count + len(turn.ids),
            cut=turn.is_cut,
            is_over=turn.ids[-1] in self._order.params.stop_ids,
        )
        episode.chains[draw.number] = chain
        self._answer(draw, choice)
        return chain

    def _choice(self, draw: _Draw, new: Mapping[str, Tensor], cut: bool) -> tuple[Choice, str]:
        """(what was drawn, as an agent is told; the text of what has ended it)"""
        tokenizer, ids = self._context.tokenizer, new["input_ids"].tolist()
        said = ids[:-1] if ids[-1] in self._order.params.stop_ids else ids
        raw = after(tokenizer, draw.context["input_ids"].tolist(), said, special_tokens=True)
        tail = "" if said == ids else tokenizer.decode(ids[-1:], special_tokens=True)
        text = after(tokenizer, draw.context["input_ids"].tolist(), said, special_tokens=False)
        if said == ids and not cut:
            whole, context = raw, draw.context["input_ids"].tolist()
            before = (after(tokenizer, context, ids[:-1], special_tokens=each) for each in (True, False))
            raw, text = (until(*each, draw.stop) for each in zip((raw, text), before, strict=True))
            tail = whole[len(raw) :]
        tokens = [tokenizer.decode([token], special_tokens=True) for token in ids]
        return Choice(text, raw, "length" if cut else "stop", tokens, new["old_logprobs"].tolist(), ids), tail

    def _answer(self, draw: _Draw, choice: Choice) -> None:
        number, choices = draw.request.number, self._choices[draw.request.number]
        choices[draw.number] = choice
        if len(choices) == draw.request.n:
            del self._choices[number]
            in_order = [choice for _, choice in sorted(choices.items())]
            read = draw.context["input_ids"]
            reply = {"choices": in_order, "prompt_tokens": len(read)}
            if draw.request.wants_ids:
                reply["prompt_ids"] = read.tolist()
            self._answers.append((number, reply))

    def samples(self) -> SampleBatch:
        """The samples of all episodes, by the keys of `draw`."""
        episodes, device, dtype = list(self._of.values()), self._engine.device, self._engine.dtype_of_rows
        made = [
            sequences(episode.chains, self._most(episode)) or [(self._nothing(episode), 0)]
            for episode in episodes
        ]
        nothing = followed({}, [], dtype)
        samples = [
            joined(nothing, *(read_up_to(start, chain.data, dtype) for chain, start in of_sample))
            for of_sample in made
        ]
        data = {}
        for key in _keys(self._order.record_kept):
            parts = [sample[key] for sample in samples]
            data[key] = Packed(torch.cat([nothing[key], *parts]).to(device), tuple(map(len, parts)))
        counts = [len(of_sample) for of_sample in made]
        lengths = [chain.length for of_sample in made for chain, _ in of_sample]
        data[LENGTHS] = Packed(torch.tensor(lengths, dtype=torch.int64, device=device), tuple(counts))
        one = (1,) * len(samples)
        ends = [episode.ended for episode in episodes if episode.ended is not None]
        truncated = torch.tensor([of_sample[-1][0].cut for of_sample in made], device=device).bool()
        rewards = torch.tensor([end.reward or 0.0 for end in ends], dtype=torch.float64, device=device)
        data |= {"truncated": Packed(truncated, one), ENVIRONMENT_REWARDS: Packed(rewards, one)}
        learned = [int(sample["response_mask"].sum()) for sample in samples]
        numbers = [
            (end.requests, end.refused, count, max(episode.drawn - tokens, 0))
            for episode, end, count, tokens in zip(episodes, ends, counts, learned, strict=True)
        ]
        of_all = torch.tensor(numbers, dtype=torch.int64, device=device).view(-1)
        data[AGENT_COUNTS] = Packed(of_all, (len(COUNTS),) * len(samples))
        texts = {AGENT_COLUMNS: [end.columns for end in ends]} if self._returns_columns else {}
        if self._config.on_reward_error == "skip":
            texts[ENVIRONMENT_FAULT] = [end.fault for end in ends]
        for key, each in texts.items():
            encoded = [text.encode(errors="backslashreplace") for text in each]
            whole = torch.tensor(list(b"".join(encoded)), dtype=torch.uint8, device=device)
            data[key] = Packed(whole, tuple(map(len, encoded)))
        return SampleBatch(tuple(self._of), data)

    def _nothing(self, episode: _Episode) -> Chain:
        """In place of a sample that failed before anything was drawn: the row's prompt and an end token. It leaves
        the batch, or counts as 0 in an evaluation."""
        end = self._context.tokenizer.eos_id
        data = dict(followed({}, [*episode.prompt.tolist(), end], self._engine.dtype_of_rows))
        data["response_mask"] = torch.arange(len(episode.prompt) + 1) == len(episode.prompt)
        nothing = Asked(0, 0, None, "", [], 1, None, [])
        return Chain(nothing, ("", ""), "", data, (0,), 1, cut=True, is_over=True)

    def close(self) -> None:
        """Close the endpoint, and end all agents."""
        self._process.close()


def _keys(record_kept: bool) -> tuple[str, ...]:
    kept = ("kept_counts", "kept_tokens") if record_kept else ()
    return ("input_ids", "response_mask", "old_logprobs", *kept)


def _plain(message: Mapping[str, Any], tokenizer: Tokenizer) -> Mapping[str, Any]:
    """A message as a template gets it; what a tool has answered cannot begin another role."""
    message = {key: value for key, value in message.items() if key != RAW}
    if message["role"] != "tool":
        return message
    return {**message, "content": tokenizer.without_special(message["content"])}
