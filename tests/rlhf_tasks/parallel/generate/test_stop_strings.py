"""Stop strings against a search in the text, token by token."""

import random

import pytest
import torch

from rlhf_tasks.parallel.generate.stop_strings import StopStrings, follow, states_behind

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
    table, states = StopStrings(strings, TEXTS).to(CPU), torch.zeros(rows, dtype=torch.int64)
    found = []
    for step in range(steps):
        states, completed = follow(table, states, torch.tensor([row[step] for row in tokens]))
        found.append(completed.tolist())
    expected = [completing(strings, row) for row in tokens]
    assert [list(row) for row in zip(*found, strict=True)] == expected
    assert 0 < sum(map(sum, expected)) < rows * steps


def test_the_states_behind_texts_are_those_after_their_tokens_one_by_one():
    draw = random.Random(1)
    texts = [
        torch.tensor([draw.randrange(len(TEXTS) + 2) for _ in range(length)], dtype=torch.int64)
        for length in (5, 0, 23, 1, 17)
    ]
    table, expected = StopStrings(["abab", "b a", "ab"], TEXTS).to(CPU), []
    for text in texts:
        state = torch.zeros(1, dtype=torch.int64)
        for token in text:
            state, _ = follow(table, state, token[None])
        expected += state.tolist()
    assert states_behind(table, texts).tolist() == expected
    assert len(set(expected)) > 2
