"""The texts of tokens, put together, are what a tokenizer decodes."""

import json
import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models

from flows.demo import byte_tokenizer
from rlhf_tasks.data.tokenizer import Tokenizer
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
