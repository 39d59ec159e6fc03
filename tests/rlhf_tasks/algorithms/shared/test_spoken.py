"""The text of a turn while it is drawn: what was told is never taken back."""

import random
from pathlib import Path

import pytest

from prefect_rlhf.flows.demo import byte_tokenizer
from prefect_rlhf.rlhf_tasks.algorithms.shared.spoken import Spoken, after, until
from tests.rlhf_tasks.data.test_tokenizer import byte_fallback, opened
from tests.second_user import _tokenizer as word_marks


@pytest.mark.parametrize("special_tokens", [False, True])
@pytest.mark.parametrize("backend", [byte_tokenizer, word_marks, byte_fallback])
def test_what_was_told_stays_whatever_is_drawn(backend, tmp_path: Path, special_tokens: bool):
    """Random tokens: parts of characters, bytes that are none, special tokens, spaces at the beginning."""
    tokenizer, draw = opened(backend(), tmp_path), random.Random(0)
    told = 0
    for _ in range(300):
        before, ids = ([draw.randrange(tokenizer.size) for _ in range(n)] for n in (3, 20))
        spoken, said, place = Spoken(tokenizer, before, [], special_tokens), "", 0
        while place < len(ids):
            said += spoken.add(new := ids[place : place + draw.randrange(1, 4)])
            place += len(new)
        assert after(tokenizer, before, ids, special_tokens).startswith(said)
        told += len(said)
    assert told > 300


def test_bytes_on_both_sides_of_a_special_token_are_told_together(tmp_path: Path):
    """What the special token hides makes them one run of bytes, of which none is a character."""
    tokenizer = opened(byte_fallback(), tmp_path)
    first = next(token for token in range(tokenizer.size) if tokenizer.is_byte(token))
    before, ids = [first + ord("B")], [first + ord("A"), 0, first + 0xFF]
    spoken = Spoken(tokenizer, before, [], special_tokens=False)
    told = "".join(spoken.add([each]) for each in ids)
    assert after(tokenizer, before, ids, special_tokens=False).startswith(told)


@pytest.mark.parametrize("strings", [["END"], ["é!"], ["aa", "aab", "é"]], ids=str)
def test_the_beginning_of_a_stop_string_is_held_back(tmp_path: Path, strings: list[str]):
    """Each byte is a token: what was told never has a part of what ends the turn."""
    tokenizer, draw = opened(byte_tokenizer(), tmp_path), random.Random(1)
    for _ in range(100):
        text = "".join(draw.choices([*"aENé", *strings[0]], k=12)) + draw.choice(strings)
        ids = tokenizer.encode(text)
        stop = next(
            n for n in range(len(ids)) if any(each in tokenizer.decode(ids[: n + 1]) for each in strings)
        )
        spoken = Spoken(tokenizer, [], strings, special_tokens=False)
        said = "".join(spoken.add([each]) for each in ids[:stop])
        ended = until(tokenizer.decode(ids[: stop + 1]), tokenizer.decode(ids[:stop]), strings)
        assert ended.startswith(said)
        assert len(ended) - len(said) < max(map(len, strings)), "only so much is held back"


def test_a_beginning_that_is_none_is_told_with_what_follows(tmp_path: Path):
    tokenizer = opened(byte_tokenizer(), tmp_path)
    spoken = Spoken(tokenizer, tokenizer.encode("Say: "), ["END"], special_tokens=False)
    assert [spoken.add(tokenizer.encode(each)) for each in "xENEéE"] == ["x", "", "", "EN", "Eé", ""]
