"""Responses of several turns: those that wait for an answer leave, others enter, and only what is new is read."""

import random
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch, micro_batch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets
from prefect_rlhf.rlhf_tasks.parallel.generate import places, slots
from prefect_rlhf.rlhf_tasks.parallel.generate.generation import generate
from prefect_rlhf.rlhf_tasks.parallel.generate.generator import Order
from prefect_rlhf.rlhf_tasks.parallel.generate.sampling import SamplingParams, StopStrings, TokenTexts
from prefect_rlhf.rlhf_tasks.parallel.generate.turn_by_turn import turn_by_turn
from prefect_rlhf.rlhf_tasks.parallel.generate.turns import Following, Turn, Turns
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.model.logprobs import packed_logprobs
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from tests.rlhf_tasks.parallel.generate.test_generation import (
    CPU,
    OF_GENERATE,
    STOPS,
    TEXTS,
    WHOLE,
    assert_alike,
    build,
    prompts,
    tokens_of_prompts,
    watched,
)

MOST, MOST_OF_TURN, TURNS = 40, 6, 4
LENGTHS = (3, 19, 1, 35, 4, 5, 2, 16)


class Game:
    """Answers each turn with tokens that follow from it, for as many turns as the sample has.

    seed      of the order in which samples are answered, and when
    held      sample -> the answers that others have before it is answered
    observed  tokens of each observation
    together  nobody is answered before nobody is drawn any more
    """

    def __init__(
        self,
        seed: int = 0,
        held: dict[int, int] | None = None,
        observed: int | None = None,
        together: bool = False,
    ) -> None:
        self._together = together
        self.log: list[tuple[str, int, int]] = []
        self._random, self._held, self._observed = random.Random(seed), held or {}, observed
        self._room: dict[int, int] = {}
        self._turns: dict[int, int] = {}
        self._waiting: dict[int, Following] = {}
        self._answered = 0

    def begun(self, sample: int, read: int) -> None:
        self.log.append(("begun", sample, read))

    def ended(self, sample: int, turn: Turn) -> None:
        self.log.append(("ended", sample, len(turn.ids)))
        assert not (turn.is_cut and turn.ids[-1] in STOPS)
        self._follow(sample, turn.ids)

    def _follow(self, sample: int, turn: Sequence[int]) -> None:
        number = self._turns[sample] = self._turns.get(sample, 0) + 1
        ids = [(sum(turn) + 7 * each) % 61 for each in range(self._observed or 1 + sum(turn) % 4)]
        room = self._room[sample] = self._room.get(sample, MOST) - len(turn) - len(ids)
        over = number > sample % TURNS or room <= 0
        most = 0 if over else min(room, MOST_OF_TURN)
        self._waiting[sample] = Following(sample, [] if over else ids, most)

    def answered(self, samples: Collection[int], wait_s: float) -> list[Following]:
        ready = [
            each
            for each in sorted(samples & self._waiting.keys())
            if self._answered >= self._held.get(each, 0)
            and (wait_s or (not self._together and self._random.random() < 0.5))
        ]
        if wait_s and not ready:  # nobody else can be answered before
            ready = sorted(samples & self._waiting.keys())[:1]
        self._random.shuffle(ready)
        self._answered += len(ready)
        self.log += [("answered", each, 0) for each in ready]
        return [self._waiting.pop(each) for each in ready]


def played(engine: Engine, game: Game, batch: SampleBatch | None = None, **options: Any) -> Any:
    given = {key: options.pop(key) for key in OF_GENERATE if key in options}
    params = SamplingParams(max_new_tokens=MOST, stop_ids=STOPS, **options)
    turns = Turns(MOST_OF_TURN, game if engine.is_head else None)
    return generate(engine, batch or prompts(LENGTHS), params, 7, 2, turns=turns, **given)


def test_partners_are_asked_at_each_check_though_all_are_taken_together():
    """What they send, and what is sent to them, must not fill their pipes."""
    waits: list[float] = []

    class Asked(Game):
        def answered(self, samples: Collection[int], wait_s: float) -> list[Following]:
            waits.append(wait_s)
            return super().answered(set(samples), wait_s)

    params = SamplingParams(max_new_tokens=MOST, stop_ids=STOPS)
    turns = Turns(MOST_OF_TURN, Asked(together=True), together=True)
    generate(build("llama", torch.float64), prompts(LENGTHS), params, 7, 2, turns=turns)
    assert 0.0 in waits


def one_after_the_other(engine: Engine, batch: SampleBatch, **options: Any) -> dict[int, list[int]]:
    """The responses, each turn a generation of its own whose prompt is all that is before it."""
    found = {}
    for sample, prompt in zip(batch.ids, batch["prompt_ids"].split(), strict=True):
        game, context, most = Game(), prompt, MOST_OF_TURN
        while most:
            one = SampleBatch((sample,), {"prompt_ids": Packed.of([context])})
            drawn = generate(engine, one, SamplingParams(most, stop_ids=STOPS, **options), 7, 2)
            assert drawn is not None
            turn = drawn["input_ids"].values[len(context) :].tolist()
            game.ended(sample, Turn(turn, bool(drawn["truncated"].values), torch.zeros(0), None))
            (following,) = game.answered({sample}, 1.0)
            context = torch.cat([drawn["input_ids"].values, torch.tensor(following.ids, dtype=torch.int64)])
            most = following.most
        found[sample] = context[len(prompt) :].tolist()
    return found


def after_prompts(samples: SampleBatch, lengths: Sequence[int] = LENGTHS) -> dict[int, list[int]]:
    parts = zip(samples.ids, lengths, samples["input_ids"].split(), strict=True)
    return {sample: ids[length:].tolist() for sample, length, ids in parts}


SETS = partial(StopStrings, texts=TokenTexts(TEXTS))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "few slots": {"micro_batches": 4},
    "likeliest": {"top_k": 20, "record_kept": True},
    "strings": {"stop_strings": StopStrings(("ab", "ce"), TokenTexts(TEXTS)), "min_new_tokens": 2},
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_are_those_of_turns_that_are_drawn_alone_in_whatever_order_they_are_answered(
    name: str, seed: int
):
    engine = build("llama", torch.float64)
    drawn = {key: value for key, value in OPTIONS[name].items() if key not in OF_GENERATE}
    samples = played(engine, Game(seed), **OPTIONS[name])
    assert after_prompts(samples) == one_after_the_other(engine, prompts(LENGTHS), **drawn)
    mask, logprobs = samples["response_mask"], samples["old_logprobs"]
    observed = (
        sum(length - prompt for length, prompt in zip(mask.lengths, LENGTHS, strict=True)) - mask.values.sum()
    )
    assert observed > 10
    assert not logprobs.values[~mask.values].any()
    assert torch.all(logprobs.values[mask.values] < 0)
    if "kept_counts" in samples.data:
        counts = samples["kept_counts"].values
        assert torch.equal(counts > 0, mask.values)
        assert len(samples["kept_tokens"].values) == counts.sum()


@pytest.mark.parametrize("check_every", [1, 4])
def test_log_probabilities_are_those_of_a_full_forward(monkeypatch, check_every: int):
    monkeypatch.setitem(slots.PACES, "cpu", slots.DecodingPace(check_every, 1, graphs=False))
    engine = build("llama", torch.float64)
    samples = played(engine, Game(), micro_batches=2)
    micro = micro_batch(samples)
    with torch.no_grad():
        expected = packed_logprobs(engine.stage(micro.input_ids, micro), micro, WHOLE, 1.0)
    mask = samples["response_mask"].values
    torch.testing.assert_close(samples["old_logprobs"].values[mask], expected[mask])


def test_a_partner_that_thinks_for_long_holds_nobody_else():
    """Sample 13 is answered when all others are over: they have all had their turns before."""
    engine, alone = build("llama", torch.float64), Game()
    played(engine, alone)
    others = sum(what == "answered" and sample != 13 for what, sample, _ in alone.log)
    game = Game(held={13: others})
    samples = played(engine, game)
    assert after_prompts(samples) == one_after_the_other(engine, prompts(LENGTHS))
    first = game.log.index(("answered", 13, 0))
    assert {sample for _, sample, _ in game.log[first + 1 :]} == {13}
    assert sum(what == "answered" and sample == 13 for what, sample, _ in game.log) > 1, "it goes on after"


@pytest.mark.parametrize("family", ["llama", "gemma4_text", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_turn_reads_only_what_is_new_each_token_once(family: str):
    engine = build(family, torch.float64)
    passed = watched(engine, tokens_of_prompts)
    game = Game()
    samples = played(engine, game)
    observed = (~samples["response_mask"].values).sum() - sum(LENGTHS)
    assert read(game) == sum(LENGTHS) - len(LENGTHS) + observed
    assert sum(passed) == read(game)
    assert after_prompts(samples) == one_after_the_other(engine, prompts(LENGTHS))


def read(game: Game) -> int:
    return sum(count for what, _, count in game.log if what == "begun")


def test_later_pieces_of_one_length_are_read_in_one_pass():
    """All observations have three tokens, and all are answered at once."""
    engine = build("llama", torch.float64)
    passes = watched(engine, lambda x, *_: (len(x), len(_) > 2))
    batch = prompts((4,) * 8, first_id=0)
    played(engine, Game(observed=3, together=True), batch.reorder([1, 5]))
    assert (2 * 3, True) in passes


def test_layers_with_states_read_their_contexts_again():
    engine = build("lfm2", torch.float64)
    game = Game()
    samples = played(engine, game)
    observed = (~samples["response_mask"].values).sum() - sum(LENGTHS)
    assert read(game) > sum(LENGTHS) + 2 * observed
    assert after_prompts(samples) == one_after_the_other(engine, prompts(LENGTHS))


def test_where_others_need_the_room_a_context_is_read_again_with_the_same_tokens(monkeypatch):
    """Nobody is answered before all have begun: with so little room some lose what they have parked."""
    monkeypatch.setattr(slots, "rows_of", lambda sequences, *_: sequences)
    engine = build("llama", torch.float64)
    lengths = tuple(20 + n for n in range(12))
    game, much = Game(together=True), Game(together=True)
    short = played(engine, game, prompts(lengths), micro_batches=4)
    whole = played(engine, much, prompts(lengths))
    assert read(game) > read(much)
    assert after_prompts(short, lengths) == after_prompts(whole, lengths)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_engine_that_draws_one_turn_at_a_time_gives_the_same(name: str):
    engine, options = build("llama", torch.float64), dict(OPTIONS[name])
    recorded = bool(options.pop("record_kept", False))
    whole = played(engine, Game(), record_kept=recorded, **options)
    options.pop("micro_batches", None)
    params = SamplingParams(max_new_tokens=MOST, stop_ids=STOPS, **options)
    order = Order(params, 7, 2, record_kept=recorded, turns=Turns(MOST_OF_TURN, Game(1)))

    def draw(batch: SampleBatch, order: Order) -> SampleBatch | None:
        assert order.turns is None
        return generate(
            engine, batch, order.params, order.seed, order.iteration, record_kept=order.record_kept
        )

    found = turn_by_turn(engine, draw, prompts(LENGTHS), order)
    assert found is not None
    assert found.data.keys() == whole.data.keys()
    for key, packed in whole.data.items():
        torch.testing.assert_close(found[key].values, packed.values)
        assert found[key].lengths == packed.lengths


class Visitors:
    """Begin sequences in empty places: prompts, each followed by as many turns as its number says. The same one comes
    three times, and the next ones when there is a place.

    seed  of the order in which places are answered, and when
    told  number of a turn -> what it was drawn from, its most tokens, and the turn
    """

    def __init__(self, seed: int = 0) -> None:
        self.told: dict[int, tuple[list[int], int, Turn]] = {}
        self.read, self._begun = 0, 0
        self._random, self._coming = random.Random(seed), [17, 17, 17, 4, 33, 2, 21]
        self._at: dict[int, tuple[int, list[int], int]] = {}  # number, context and most of a place's turn
        self._left: dict[int, int] = {}  # turns

    def begun(self, sample: int, read: int) -> None:
        self.read += read

    def ended(self, sample: int, turn: Turn) -> None:
        number, context, most = self._at[sample]
        candidates = turn.candidates and (turn.candidates[0].clone(), turn.candidates[1].clone())
        self.told[number] = (
            context,
            most,
            turn._replace(logprobs=turn.logprobs.clone(), candidates=candidates),
        )

    def answered(self, samples: Collection[int], wait_s: float) -> list[Following]:
        ready = [each for each in sorted(samples) if wait_s or self._random.random() < 0.5]
        self._random.shuffle(ready)
        return [self._following(place) for place in ready]

    def _following(self, place: int) -> Following:
        number, anew = self._begun, False
        self._begun += 1
        if self._left.get(place):
            self._left[place] -= 1
            before, _, turn = self.told[self._at[place][0]]
            new, before = [number % 61, 5], [*before, *turn.ids]
        elif self._coming:
            anew, length, before = True, self._coming.pop(0), []
            new, self._left[place] = [(length * 7 + each) % 61 for each in range(length)], number % 3
        else:
            return Following(place)
        most = 2 + number % 5
        self._at[place] = number, [*before, *new], most
        return Following(place, new, most, number, anew)


def visited(engine: Engine, visitors: Visitors, places: int = 4, stops: Any = None, **options: Any) -> None:
    given = {key: options.pop(key) for key in OF_GENERATE if key in options}
    params = SamplingParams(max_new_tokens=80, stop_ids=STOPS, **options)
    empty = {"prompt_ids": Packed(torch.zeros(0, dtype=torch.int64), (0,) * places)}
    turns = Turns(80, visitors if engine.is_head else None, stop_strings=stops)
    if engine.is_head and isinstance(visitors, Hearing):
        turns = turns._replace(listener=visitors)
    generate(engine, SampleBatch(tuple(range(places)), empty), params, 7, 2, turns=turns, **given)


def assert_drawn_alone(visitors: Visitors, **options: Any) -> None:
    """Each turn is what a generation of its own draws."""
    engine, recorded = build("llama", torch.float64), bool(options.get("record_kept"))
    drawn = {key: value for key, value in options.items() if key not in OF_GENERATE}
    for number, (context, most, turn) in visitors.told.items():
        one = SampleBatch((number,), {"prompt_ids": Packed.of([torch.tensor(context)])})
        if (stop := visitors.asked.get(number) if isinstance(visitors, Stopping) else None) is not None:
            drawn["stop_strings"] = SETS(stop)
        else:
            drawn["stop_strings"] = options.get("stop_strings")
        drawn["min_new_tokens"] = min(options.get("min_new_tokens", 0), most)
        found = generate(
            engine, one, SamplingParams(most, stop_ids=STOPS, **drawn), 7, 2, record_kept=recorded
        )
        assert found is not None
        assert found["input_ids"].values.tolist() == [*context, *turn.ids]
        assert bool(found["truncated"].values) == turn.is_cut
        torch.testing.assert_close(found["old_logprobs"].values[len(context) :], turn.logprobs)
        if turn.candidates is not None:
            assert torch.equal(found["kept_counts"].values[len(context) :], turn.candidates[0])
            assert torch.equal(found["kept_tokens"].values, turn.candidates[1])


@pytest.mark.parametrize("name", OPTIONS)
def test_places_begin_when_their_prompts_come_and_one_after_the_other(name: str):
    visitors = Visitors()
    visited(build("llama", torch.float64), visitors, **OPTIONS[name])
    assert len(visitors.told) > 12
    assert_drawn_alone(visitors, **{"min_new_tokens": 0, **OPTIONS[name]})


def test_of_sequences_that_begin_alike_one_is_read_and_of_those_that_go_on_what_is_new():
    engine, visitors = build("llama", torch.float64), Visitors()
    passed = watched(engine, tokens_of_prompts)
    visited(engine, visitors, places=7)
    assert sum(passed) == visitors.read
    lengths = [17, 4, 33, 2, 21]
    later = len(visitors.told) - 7
    assert visitors.read == sum(lengths) - len(lengths) + 2 * later


STRINGS = [("ab", "ce"), None, ("d",), (), ("aba", "é", "bcd")]


class Stopping(Visitors):
    """Each turn ends with strings of its own. asked: those of turns by number"""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.asked: dict[int, tuple[str, ...] | None] = {}

    def _following(self, place: int) -> Following:
        following = super()._following(place)
        if following.number is not None:
            self.asked[following.number] = stop = STRINGS[following.number % len(STRINGS)]
            following = following._replace(stop=stop, most=following.most + 8)
            self._at[place] = (*self._at[place][:2], following.most)
        return following


def test_turns_end_with_strings_of_their_own_beside_others(monkeypatch):
    monkeypatch.setattr(places, "KEPT_SETS", 2)  # others take the room of those that are not in use
    visitors, of_order = Stopping(), OPTIONS["strings"]
    visited(build("llama", torch.float64), visitors, stops=SETS, **of_order)
    assert_drawn_alone(visitors, **of_order)
    ended = [number for number, (_, most, turn) in visitors.told.items() if len(turn.ids) < most]
    assert len({visitors.asked[number] for number in ended}) > 3


def test_turns_have_strings_though_the_order_has_none():
    visitors = Stopping()
    visited(build("llama", torch.float64), visitors, stops=SETS)
    assert_drawn_alone(visitors)


class Hearing(Stopping):
    """Hears the turns of even numbers while they are drawn."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.heard: dict[int, list[tuple[int, float]]] = {}

    def listened(self) -> dict[int, int]:
        even = {place: number for place, (number, _, _) in self._at.items() if number % 2 == 0}
        return {place: len(self.heard.setdefault(number, [])) for place, number in even.items()}

    def drawn(self, sample: int, ids: Sequence[int], logprobs: torch.Tensor) -> None:
        number = self._at[sample][0]
        assert number not in self.told, "it has not ended"
        self.heard[number] += zip(ids, logprobs.tolist(), strict=True)


@pytest.mark.parametrize("check_every", [1, 4])
@pytest.mark.parametrize("name", ["plain", "few slots"])
def test_turns_are_heard_while_they_are_drawn(monkeypatch, name: str, check_every: int):
    monkeypatch.setitem(slots.PACES, "cpu", slots.DecodingPace(check_every, 1, graphs=False))
    visitors = Hearing()
    visited(build("llama", torch.float64), visitors, stops=SETS, **OPTIONS[name])
    assert_heard(visitors)
    assert_drawn_alone(visitors)


def assert_heard(visitors: Hearing) -> None:
    """What was heard of each even turn is what it begins with, all but what its last check has found."""
    assert sum(map(bool, visitors.heard.values())) > 1
    for number, heard in visitors.heard.items():
        _, _, turn = visitors.told[number]
        assert len(heard) < len(turn.ids)
        whole = list(zip(turn.ids, turn.logprobs.tolist(), strict=True))
        assert heard == whole[: len(heard)]


class Twins(Visitors):
    """Places 0 and 1 begin alike. The turn of place 0 ends first, and two go on with it at once: one there, and one
    from the beginning in place 4."""

    def answered(self, samples: Collection[int], wait_s: float) -> list[Following]:
        if not self._at:
            alike = [*range(33)]
            return [self._goes(place, place, alike[place // 2 :], 40 if place else 3) for place in range(4)]
        if len(self._at) == 4 and 0 in samples:
            before, _, turn = self.told[0]
            whole = [*before, *turn.ids, 3, 5]
            return [self._goes(0, 10, whole, 40, new=2), self._goes(4, 11, whole, 40)]
        return [Following(place) for place in samples] if wait_s else []

    def _goes(self, place: int, number: int, context: list[int], most: int, new: int = 0) -> Following:
        self._at[place] = number, context, most
        return Following(place, context[-new:], most, number, anew=not new)


class Uncaptured(slots.DecodeGraphs):
    """As graphs, for which rows of sequences that have ended stay."""

    def run(self, x: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        return self._forward(x, micro, self._cache)


def test_two_that_go_on_with_one_turn_at_once_leave_what_others_share_with_it_as_it_is(monkeypatch):
    monkeypatch.setattr(slots, "DecodeGraphs", Uncaptured)
    monkeypatch.setattr(f"{__name__}.STOPS", (1000,))
    monkeypatch.setitem(slots.PACES, "cpu", slots.DecodingPace(4, 8, graphs=True))
    visitors = Twins()
    visited(build("llama", torch.float64), visitors, places=5)
    monkeypatch.setitem(slots.PACES, "cpu", slots.DecodingPace(1, 1, graphs=False))
    assert visitors.told.keys() == {0, 1, 2, 3, 10, 11}
    assert_drawn_alone(visitors)


# Several ranks


def _play_on(
    rank: int, world: int, strategy: ParallelStrategy, options: dict[str, Any]
) -> SampleBatch | None:
    placement = Placement(tuple(range(world)), strategy)
    groups = ProcessGroups(device_sets(placement), 240.0, CPU)
    engine, batch = build("llama", torch.float64, strategy, groups), prompts(LENGTHS)
    mine = [i for n, i in enumerate(batch.ids) if n // 2 % strategy.dp == placement.coordinate(rank).dp]
    samples = played(engine, Game(rank), batch.reorder(mine), **options)
    groups.close()
    return samples


@pytest.mark.dist
@pytest.mark.parametrize(
    "strategy",
    [
        ParallelStrategy(dp=2),
        ParallelStrategy(tp=2),
        ParallelStrategy(pp=2),
        pytest.param(ParallelStrategy(tp=2, pp=2), marks=pytest.mark.whole),
        *(pytest.param(ParallelStrategy(*sizes), marks=pytest.mark.slow) for sizes in ((1, 1, 4), (2, 1, 2))),
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_the_layout(ranks, strategy: ParallelStrategy):
    alone = played(build("llama", torch.float64), Game())
    of_ranks = ranks.run(strategy.size, _play_on, strategy, {"micro_batches": 2})
    assert_alike(of_ranks, alone, strategy.dp)


def _visit_on(rank: int, world: int, strategy: ParallelStrategy) -> dict[str, Any] | None:
    placement = Placement(tuple(range(world)), strategy)
    groups = ProcessGroups(device_sets(placement), 240.0, CPU)
    visitors = Hearing(1)
    engine = build("llama", torch.float64, strategy, groups)
    visited(engine, visitors, stops=SETS, micro_batches=2)
    groups.close()
    return {key: getattr(visitors, key) for key in ("told", "asked", "heard")} if engine.is_head else None


@pytest.mark.dist
@pytest.mark.parametrize(
    "strategy",
    [
        ParallelStrategy(tp=2),
        ParallelStrategy(pp=2),
        pytest.param(ParallelStrategy(tp=2, pp=2), marks=pytest.mark.whole),
    ],
    ids=str,
)
def test_nor_do_those_of_places_that_begin_later(ranks, strategy: ParallelStrategy):
    visitors = Hearing()
    (found,) = [each for each in ranks.run(strategy.size, _visit_on, strategy) if each]
    vars(visitors).update(found)
    assert len(visitors.told) >= 12
    assert_drawn_alone(visitors)
    assert_heard(visitors)
