"""The sampler against a plain reference, by its frequencies, and at its edges. Stop strings against a search in the
text."""

import math
import random

import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups
from prefect_rlhf.rlhf_tasks.parallel.generate.sampling import (
    SamplingParams,
    StopStrings,
    StopTable,
    TokenTexts,
    follow,
    sample,
    states_after,
    uniform,
)
from prefect_rlhf.rlhf_tasks.parallel.layout import work
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import split
from prefect_rlhf.rlhf_tasks.parallel.model.logprobs import Vocabulary

FIRST = torch.zeros(1, dtype=torch.int64)
"""The number of a response's first token."""


def spread(n: int) -> Tensor:
    """Uniform numbers that cover [0, 1) evenly: a draw from each n-th of the distribution."""
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def random_logits(rows: int, vocab: int) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(2)) * 2


def reference(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Probabilities after transformers' own warpers, in its order."""
    scores = TemperatureLogitsWarper(temperature)(None, logits.double())
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores.softmax(-1)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.7, 0, 1.0),
        (1.0, 5, 1.0),
        (1.0, 0, 0.6),
        (1.3, 12, 0.8),
        (1.0, 100, 1e-9),
        (1.0, 1, 1.0),
    ],
)
def test_distribution_equals_transformers(temperature: float, top_k: int, top_p: float):
    params = SamplingParams(max_new_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p)
    n, vocab = 4000, 40
    for row in random_logits(3, vocab):
        expected = reference(row[None], temperature, top_k, top_p)[0]
        tokens, logprobs, _ = sample(row.expand(n, vocab), params, spread(n), FIRST.expand(n))
        frequencies = torch.bincount(tokens, minlength=vocab) / n
        # Even numbers through the inverse distribution: each token's share is right to one draw at each end.
        assert float((frequencies - expected).abs().max()) <= 2 / n
        assert not bool(frequencies[expected == 0].any())
        torch.testing.assert_close(logprobs, expected[tokens].log(), atol=1e-12, rtol=0)


def test_frequencies_of_a_uniform_model():
    """A model that finds all tokens equally likely, sampled with the numbers that generation uses."""
    vocab, sequences, steps = 50, 400, 50
    params = SamplingParams(max_new_tokens=steps)
    counts = torch.zeros(vocab)
    for step in range(steps):
        numbers = uniform(0, "rollout", 0, torch.arange(sequences), torch.tensor(7 + step))
        tokens, logprobs, _ = sample(
            torch.zeros(sequences, vocab), params, numbers, torch.full((sequences,), step)
        )
        counts += torch.bincount(tokens, minlength=vocab)
        assert torch.allclose(logprobs, torch.tensor(-math.log(vocab), dtype=torch.float64))
    expected = sequences * steps / vocab
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    assert 23.98 < chi2 < 85.35  # 0.1% and 99.9% points at 49 degrees of freedom


def test_greedy_takes_the_likeliest_and_reports_temperature_one():
    logits = random_logits(6, 30)
    tokens, logprobs, _ = sample(
        logits, SamplingParams(max_new_tokens=1, temperature=0.0), torch.zeros(6), FIRST.expand(6)
    )
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logprobs, logits.double().log_softmax(-1).amax(-1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_are_excluded_from_the_first_tokens_only(temperature: float):
    logits = torch.zeros(100, 4)
    logits[:, 2] = 5.0
    params = SamplingParams(max_new_tokens=9, temperature=temperature, min_new_tokens=3, stop_ids=(2,))
    for new_token in range(5):
        tokens, logprobs, _ = sample(logits, params, spread(100), FIRST.expand(100) + new_token)
        assert bool((tokens == 2).any()) == (new_token >= 3)
        if new_token < 3:  # renormalised over the other three
            assert torch.allclose(logprobs, torch.tensor(-math.log(3), dtype=torch.float64))


def test_each_row_is_at_a_token_of_its_own():
    logits = torch.zeros(4, 4)
    logits[:, 2] = 50.0
    params = SamplingParams(max_new_tokens=9, min_new_tokens=3, stop_ids=(2,))
    tokens, _, _ = sample(logits, params, spread(4), torch.tensor([3, 2, 0, 5]))
    assert (tokens == 2).tolist() == [True, False, False, True]


def test_the_largest_uniform_stays_inside_and_zero_skips_excluded_tokens():
    logits = torch.zeros(2, 5)
    logits[:, [0, 4]] = -torch.inf
    tokens, _, _ = sample(
        logits,
        SamplingParams(max_new_tokens=1),
        torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64),
        FIRST.expand(2),
    )
    assert tokens.tolist() == [1, 3]


def test_half_precision_logits_are_sampled_in_float64():
    logits = random_logits(8, 100)
    params = SamplingParams(max_new_tokens=1)
    tokens, logprobs, _ = sample(logits.bfloat16(), params, spread(8), FIRST.expand(8))
    again, exact, _ = sample(logits.bfloat16().double(), params, spread(8), FIRST.expand(8))
    assert torch.equal(tokens, again)
    assert torch.equal(logprobs, exact)
    assert logprobs.dtype == torch.float64


@pytest.mark.parametrize(
    "field",
    [
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_new_tokens": 9},
    ],
    ids=str,
)
def test_fields_out_of_range_are_named(field: dict):
    with pytest.raises(ValueError, match=next(iter(field))):
        SamplingParams(**{"max_new_tokens": 4, **field})


@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.0}], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_logits_that_are_no_distribution_give_a_nan_and_leave_other_rows_alone(cut: dict, bad: float):
    logits, numbers = random_logits(3, 7), spread(3)
    params = SamplingParams(max_new_tokens=1, **cut)
    sound = sample(logits, params, numbers, FIRST.expand(3))
    for unsound in (logits[1].index_fill(0, torch.tensor(4), bad), torch.full((7,), -math.inf)):
        tokens, logprobs, _ = sample(
            torch.stack([logits[0], unsound, logits[2]]), params, numbers, FIRST.expand(3)
        )
        assert logprobs.isnan().tolist() == [False, True, False]
        assert 0 <= int(tokens[1]) < 7
        assert torch.equal(tokens[[0, 2]], sound.tokens[[0, 2]])
        assert torch.equal(logprobs[[0, 2]], sound.logprobs[[0, 2]])


# Several ranks: each draws from its part of the vocabulary

WAYS = (
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"top_k": 5},
    {"top_k": 40},
    {"top_p": 0.6},
    {"top_p": 1e-9},
    {"top_k": 12, "top_p": 0.8, "temperature": 1.3},
    {"min_new_tokens": 2, "stop_ids": (0, 33, 40)},
)


def hard_logits(vocab: int, dtype: torch.dtype) -> Tensor:
    """Rows with equal logits over the borders of parts, with parts that cannot be drawn, and with no distribution."""
    logits = random_logits(40, vocab).to(dtype)
    logits[1] = 0.0
    logits[2] = logits[2].round()
    logits[3, : vocab // 2] = -torch.inf
    logits[4, vocab // 2 :] = -torch.inf
    logits[5, 3] = math.nan
    logits[6, vocab - 2] = math.inf
    logits[7] = -torch.inf
    logits[8, 1::2] = -0.0
    logits[8, ::2] = 0.0
    return logits


def _draw_in_parts(rank: int, world: int, vocab: int, dtype: torch.dtype) -> list:
    devices = tuple(range(world))
    group = ProcessGroups([devices], 240.0, torch.device("cpu"))[devices]
    parts = [split(vocab, world, part) for part in range(world)]
    tp_rank = world - 1 - rank  # tp ranks need not be in the order of devices
    vocabulary = Vocabulary(tuple(part.size for part in parts), tp_rank, group, tuple(reversed(range(world))))
    logits = hard_logits(vocab, dtype)[:, parts[tp_rank].start : parts[tp_rank].stop]
    found = []
    for way in WAYS:
        params = SamplingParams(max_new_tokens=9, **way)
        drawn = sample(logits, params, spread(40), torch.arange(40) % 3, vocabulary, record_kept=True)
        found.append((drawn.tokens, drawn.logprobs, vocabulary.tokens_of(drawn.kept)))
    return found


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "vocab", "dtype"),
    [(2, 41, torch.float32), (3, 100, torch.float64), (3, 41, torch.bfloat16)],
)
def test_parts_of_the_vocabulary_give_the_tokens_of_the_whole(ranks, world, vocab, dtype):
    of_ranks = ranks.run(world, _draw_in_parts, vocab, dtype)
    logits = hard_logits(vocab, dtype)
    sound = torch.tensor([row not in (5, 6, 7) for row in range(40)])
    for way, *of_way in zip(WAYS, *of_ranks, strict=True):
        params = SamplingParams(max_new_tokens=9, **way)
        whole = sample(logits, params, spread(40), torch.arange(40) % 3, record_kept=True)
        kept = [row.nonzero()[:, 0].tolist() for row in whole.kept]
        assert torch.equal(whole.logprobs.isnan(), ~sound)
        for tokens, logprobs, kept_in_parts in of_way:
            assert torch.equal(tokens[sound], whole.tokens[sound]), way
            assert torch.equal(logprobs[sound], of_way[0][1][sound])
            torch.testing.assert_close(logprobs, whole.logprobs, rtol=0, atol=1e-12, equal_nan=True)
            for row in sound.nonzero()[:, 0].tolist():
                assert kept_in_parts[row].tolist() == kept[row], (way, row)


def _gathered_per_row(rank: int, world: int, vocab: int, rows: int) -> list[float]:
    group = ProcessGroups([(0, 1)], 240.0, torch.device("cpu"))[0, 1]
    parts = [split(vocab, world, part) for part in range(world)]
    sent: list[int] = []

    class Counting(Vocabulary):
        def gather(self, mine: torch.Tensor) -> torch.Tensor:
            sent.append(mine.numel())
            return Vocabulary.gather(self, mine)

    vocabulary = Counting(tuple(part.size for part in parts), rank, group, (0, 1))
    logits = random_logits(rows, vocab)[:, parts[rank].start : parts[rank].stop]
    found = []
    for way in ({}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.6}):
        sent.clear()
        sample(logits, SamplingParams(max_new_tokens=1, **way), spread(rows), FIRST.expand(rows), vocabulary)
        found.append(sum(sent) / rows)
    return found


@pytest.mark.dist
def test_no_rank_gathers_the_whole_vocabulary_to_draw(ranks):
    """A few numbers of each row are sent, however large the vocabulary is."""
    small, large = (ranks.run(2, _gathered_per_row, vocab, 8)[0] for vocab in (4096, 16384))
    assert small == large
    plain, greedy, top_k, top_p = large
    assert max(plain, greedy) <= 4
    assert top_k <= 4 + 5
    assert top_p <= 4096


def test_of_equal_logits_at_the_border_of_the_nucleus_the_first_tokens_are_kept():
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, -2.0, 1.0]])
    likeliest = float(logits.softmax(-1)[0, 1])
    one = float(logits.softmax(-1)[0, 0])
    for equal in range(4):
        params = SamplingParams(max_new_tokens=1, top_p=likeliest + (equal - 0.5) * one)
        drawn = sample(logits, params, spread(1), FIRST, record_kept=True)
        assert drawn.kept.nonzero()[:, 1].tolist() == sorted([1, *[0, 2, 3, 5][:equal]])


def test_rows_that_are_drawn_a_few_at_a_time_are_those_drawn_together(monkeypatch):
    logits, numbers = random_logits(7, 30), spread(7)
    for way in ({}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.0}):
        params = SamplingParams(max_new_tokens=1, **way)
        monkeypatch.undo()
        together = sample(logits, params, numbers, FIRST.expand(7), record_kept=True)
        monkeypatch.setitem(work.SAMPLED_AT_ONCE, "cpu", 60)
        for one, other in zip(
            together, sample(logits, params, numbers, FIRST.expand(7), record_kept=True), strict=True
        ):
            assert torch.equal(one, other)


CPU = torch.device("cpu")
TEXTS = [
    b"a",
    b"b",
    b"ab",
    b"",
    b"aab",
    b"ba",
    b" ",
    "é".encode(),
    "é".encode()[:1],
    "é".encode()[1:],
    b"bxa",
]


def completing(strings: list[str], tokens: list[int]) -> list[bool]:
    """Of each token, whether a string ends in the text that it adds."""
    found, text = [], b""
    for token in tokens:
        added = TEXTS[token] if token < len(TEXTS) else b""
        ends = range(len(text) + 1, len(text) + len(added) + 1)
        text += added
        found.append(any(text[:end].endswith(string.encode()) for end in ends for string in strings))
    return found


@pytest.mark.parametrize(
    "strings", [["aab"], ["é", "ba"], ["abab", "b a", "ab"], ["a"], ["bab", "abaa"]], ids=str
)
def test_a_string_is_completed_where_a_search_in_the_text_finds_it(strings: list[str]):
    draw = random.Random(0)
    rows, steps = 40, 60
    tokens = [[draw.randrange(len(TEXTS) + 2) for _ in range(steps)] for _ in range(rows)]  # two have no text
    table, states = StopStrings(strings, TokenTexts(TEXTS)).to(CPU), torch.zeros(rows, dtype=torch.int64)
    found = []
    for step in range(steps):
        states, completed = follow(table, states, torch.tensor([row[step] for row in tokens]))
        found.append(completed.tolist())
    expected = [completing(strings, row) for row in tokens]
    assert [list(row) for row in zip(*found, strict=True)] == expected
    assert 0 < sum(map(sum, expected)) < rows * steps


def test_rows_with_other_strings_are_followed_together():
    draw, texts = random.Random(2), TokenTexts(TEXTS)
    sets = [[], ["aab"], ["é", "ba"], ["abab", "b a", "ab"]]
    table = StopTable.of([StopStrings(strings, texts) for strings in sets], CPU)
    numbers = torch.arange(40) % 4
    states = torch.zeros(40, dtype=torch.int64)
    tokens = torch.tensor([[draw.randrange(len(TEXTS) + 2) for _ in range(60)] for _ in range(40)])
    found = []
    for step in tokens.unbind(1):
        states, completed = follow(table, states, step, numbers)
        found.append(completed.tolist())
    expected = [completing(sets[number], row) for number, row in zip(numbers, tokens.tolist(), strict=True)]
    assert [list(row) for row in zip(*found, strict=True)] == expected


def test_the_states_after_texts_are_those_after_their_tokens_one_by_one():
    draw = random.Random(1)
    texts = [
        torch.tensor([draw.randrange(len(TEXTS) + 2) for _ in range(length)], dtype=torch.int64)
        for length in (5, 0, 23, 1, 17)
    ]
    table, expected = StopStrings(["abab", "b a", "ab"], TokenTexts(TEXTS)).to(CPU), []
    for text in texts:
        state = torch.zeros(1, dtype=torch.int64)
        for token in text:
            state, _ = follow(table, state, token[None])
        expected += state.tolist()
    assert states_after(table, texts).tolist() == expected
    assert len(set(expected)) > 2
