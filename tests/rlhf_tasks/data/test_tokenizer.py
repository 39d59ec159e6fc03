"""Tokens and their texts; observations as the tokens that the model reads next."""

import json
import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models

from prefect_rlhf.flows.demo import byte_tokenizer
from prefect_rlhf.rlhf_tasks.data.chat_template import TokenizerError
from prefect_rlhf.rlhf_tasks.data.tokenizer import Observations, Tokenizer
from tests.second_user import _tokenizer as word_marks


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2's: word marks, and a token <0x..> for each byte."""
    pieces = ["</s>", "▁", "▁the", "he", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    strip = decoders.Strip(content=" ", left=1)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    backend.add_special_tokens(["</s>"])
    return backend


def opened(backend: tokenizers.Tokenizer, folder: Path) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    end = backend.id_to_token(0)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize("backend", [byte_tokenizer, word_marks, byte_fallback])
def test_texts_of_tokens_make_the_decoded_text(backend, tmp_path: Path):
    tokenizer, draw = opened(backend(), tmp_path), random.Random(1)
    texts = tokenizer.texts()
    assert len(texts) == tokenizer.size
    assert texts[0] == b"", "special tokens have no text"
    start = next(i for i, text in enumerate(texts) if text.strip().isalpha())
    head = tokenizer.decode([start])
    for _ in range(200):
        ids = [draw.randrange(tokenizer.size) for _ in range(8)]
        added = b"".join(texts[i] for i in ids)
        if b"\xef\xbf\xbd" in added or "\ufffd" in added.decode(errors="replace"):
            continue  # bytes that are no characters: each tokenizer shows them in its own way
        assert tokenizer.decode([start, *ids]) == head + added.decode()


@pytest.mark.parametrize("backend", [byte_tokenizer, byte_fallback])
def test_a_character_in_several_tokens_has_its_bytes(backend, tmp_path: Path):
    texts = opened(backend(), tmp_path).texts()
    assert {bytes([byte]) for byte in range(256)} <= set(texts)


TURNS = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ASKED = [{"role": "user", "content": "Guess."}]


def tokenizer_with(template: str, folder: Path) -> Tokenizer:
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize("ends", [True, False], ids=["after an end of turn", "after a turn that was cut"])
def test_behind_a_conversation_it_is_the_users_next_turn(tmp_path: Path, ends: bool):
    tokenizer = tokenizer_with(TURNS, tmp_path)
    (asked,) = tokenizer.render([(ASKED, True)])
    said = tokenizer.encode("4<eos>" if ends else "4")
    observed = Observations(tokenizer).ids("lower", ASKED, said[-1])
    conversation = [*ASKED, {"role": "assistant", "content": "4"}, {"role": "user", "content": "lower"}]
    (whole,) = tokenizer.render([(conversation, True)])
    assert [*tokenizer.encode(asked), *said, *observed] == tokenizer.encode(whole)


def test_behind_text_it_is_this_text_alone(tmp_path: Path):
    tokenizer = tokenizer_with(TURNS, tmp_path)
    assert Observations(tokenizer).ids("lower", "Guess.", 9) == tokenizer.encode("lower")


def test_a_template_that_leaves_out_a_users_later_turn_is_refused(tmp_path: Path):
    tokenizer = tokenizer_with("{{ messages[0].content }}{{ messages[1].content if messages[1:] }}", tmp_path)
    with pytest.raises(TokenizerError, match="does not write a user's turn after the assistant's"):
        Observations(tokenizer).ids("lower", ASKED, 9)


def test_a_folder_that_holds_no_tokenizer_is_named(plain_folder: Path, tmp_path: Path):
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="cannot be read as a tokenizer"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((plain_folder / "tokenizer.json").read_bytes())
    with pytest.raises(TokenizerError, match="declares no end token"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": [7, 9]}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.stop_ids, tokenizer.pad_id) == ((7, 9), 7)
