"""A guessing game to learn in several turns: a tiny Llama with random weights, and players who begin games.

    python -m prefect_rlhf.deployments.examples.guessing runs/guessing [--seed N]
    prefect-rlhf run grpo --config deployments/examples/guessing-grpo.yaml

The model reads a player's name, guesses a number from 1 to 3, reads a hint ("higher" or "lower"), and has one guess
more. Who begins with 2 and reads the hint always wins; who does not read it wins 2 games of 3 at most.
"""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from random import Random
from string import ascii_lowercase, digits

import cyclopts
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from prefect_rlhf.flows.demo import write_jsonl

NUMBERS = 3
PLAYERS = {"train": 400, "test": 300}
"""Rows of each set. No player is in both."""
HINTS = ("higher", "lower", "number", "right")
PAD, EOS = "<pad>", "<eos>"


def write_model(folder: Path, seed: int) -> None:
    """Write a Llama of some 100,000 random weights as a Hugging Face folder: a token for each character and hint."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        set_seed,
    )  # here, because it takes seconds to import

    words = [PAD, EOS, *HINTS, " ", ":", *digits, *ascii_lowercase]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=PAD)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{'|'.join(HINTS)}|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, EOS])
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=words.index(PAD),
        bos_token_id=None,
        eos_token_id=words.index(EOS),
    )
    set_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": PAD, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


def games(seed: int) -> Iterator[dict[str, str]]:
    """Rows of players with names of three letters, in random order. The environment draws a number for each game."""
    names = ["".join(letters) for letters in product(ascii_lowercase, repeat=3)]
    Random(seed).shuffle(names)
    return ({"prompt": f"{name}: "} for name in names)


def write_game(folder: Path, seed: int = 0) -> None:
    """Write `model`, `train.jsonl` and `test.jsonl`, whose rows have the numbers that are to be guessed."""
    write_model(folder / "model", seed)
    rows = games(seed)
    write_jsonl(folder / "train.jsonl", [next(rows) for _ in range(PLAYERS["train"])])
    held_out = [{**next(rows), "number": 1 + place % NUMBERS} for place in range(PLAYERS["test"])]
    write_jsonl(folder / "test.jsonl", held_out)


if __name__ == "__main__":
    cyclopts.run(write_game)
