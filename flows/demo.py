"""The demo's task: reasoning-gym's `spell_backward`, its data sets, its byte tokenizer and its tiny Llama.

All sets of words are disjoint. The demonstrations are sloppy on purpose, like human ones: some have the answer's last
two letters swapped. The verifier (deployments/demo/reward.py) is always right. Reinforcement learning closes that
gap.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from prefect_rlhf.rlhf_tasks.system.reading import ConfigError

DATA = "data"
"""The folder of these sets in a demo's folder."""

SIZES = {"test": 500, "dev": 200, "demonstrations": 1500, "preferences": 1200, "prompts": 6000}
"""Words in each set."""

CALIBRATION = 512
"""Number of prompts that the SFT model answers to find the mean and std of the reward model's scores."""

PAIRS = 400
"""Maximum number of preference pairs."""

SLOPPINESS = 0.6
"""Probability that a demonstration's last two letters are swapped."""

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")

MODEL: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "vocab_size": 260,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
"""A Llama of 820,864 parameters."""


def data_is_there(folder: Path) -> bool:
    """Whether `write_demo_data` has completed. It writes config.json of the model folder last."""
    return (folder / "base" / "config.json").exists()


def refuse_without_task(folder: Path) -> None:
    """Raises ConfigError when a demo's data do not exist yet and reasoning-gym is not installed."""
    if not data_is_there(folder) and find_spec("reasoning_gym") is None:
        raise ConfigError("the demo's task comes from reasoning-gym. Run: pip install 'prefect-rlhf[demo]'")


def write_demo_data(folder: Path, seed: int) -> None:
    """Write `<set>.jsonl` for each set, and the model folder `base` (configuration, tokenizer, no weights).

    Rows are {prompt, answer}; of demonstrations {prompt, completion}. The set `calibration` has the first CALIBRATION
    of the prompts. The same seed gives the same bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw = Random(f"demo/{seed}")
    entries = _entries(sum(SIZES.values()), seed)
    for name, size in SIZES.items():
        taken, entries = entries[:size], entries[size:]
        if name == "demonstrations":
            taken = [{"prompt": e["prompt"], "completion": sloppy(e["answer"], draw)} for e in taken]
        write_jsonl(folder / f"{name}.jsonl", taken)
        if name == "prompts":
            write_jsonl(folder / "calibration.jsonl", taken[:CALIBRATION])
    write_model_folder(folder / "base")


def write_model_folder(folder: Path) -> None:
    """Write the demo's model folder without weights. A run that loads it draws them from its seed."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    pad, bos, eos, unk = SPECIAL_TOKENS
    documents = {
        "generation_config.json": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": pad,
            "bos_token": bos,
            "eos_token": eos,
            "unk_token": unk,
            "model_max_length": MODEL["max_position_embeddings"],
        },
        "config.json": MODEL,  # must be written last: see data_is_there
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=2) + "\n")


def byte_tokenizer() -> Tokenizer:
    """A tokenizer of 260 tokens: four special tokens, then one for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def sloppy(answer: str, draw: Random) -> str:
    """A demonstrator's answer: with probability SLOPPINESS its last two letters are swapped."""
    if draw.random() < SLOPPINESS:
        return answer[:-2] + answer[-1] + answer[-2]
    return answer


def preference_pairs(samples: Iterable[Mapping[str, Any]], n_pairs: int, seed: int) -> list[dict[str, str]]:
    """Pairs of a right and a wrong answer to one prompt, from scored samples of a rollout.

    samples  {prompt, completion, score, columns: {answer}}, several per prompt; a score of 1 is right
    n_pairs  maximum number of pairs; at most a quarter of it are near misses (see `near_miss`)
    """
    by_prompt: dict[str, list[Mapping[str, Any]]] = {}
    for sample in samples:
        by_prompt.setdefault(sample["prompt"], []).append(sample)
    draw = Random(f"pairs/{seed}")
    far, near = [], []
    for prompt, answers in by_prompt.items():
        right = [a["completion"] for a in answers if a["score"] == 1]
        wrong = [a["completion"] for a in answers if a["score"] != 1]
        if right and wrong:
            pair = {"prompt": prompt, "chosen": draw.choice(right), "rejected": draw.choice(wrong)}
            (near if near_miss(pair["chosen"], pair["rejected"]) else far).append(pair)
    near = near[: n_pairs // 4]
    pairs = [*near, *far[: n_pairs - len(near)]]
    draw.shuffle(pairs)
    return pairs


def accuracy(samples: Sequence[Mapping[str, Any]]) -> float:
    """Share of samples that the verifier scores as right, from 0 to 1."""
    return fmean(sample["rewards"]["exact"] for sample in samples)


def score_statistics(samples: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """(mean, standard deviation) of the reward model's raw scores, by which PPO normalises them."""
    scores = [sample["reward_model"] for sample in samples]
    return fmean(scores), stdev(scores)


def near_miss(right: str, wrong: str) -> bool:
    """Whether two answers have the same letters in any order, or differ in only one position."""
    return sorted(right) == sorted(wrong) or (
        len(right) == len(wrong) and sum(a != b for a, b in zip(right, wrong, strict=True)) == 1
    )


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line. The file is renamed into place when it is complete."""
    partial = path.with_suffix(".tmp")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    partial.replace(path)


def _entries(count: int, seed: int) -> list[dict[str, str]]:
    """{prompt, answer} of `count` different words of 3 to 7 letters, in random order."""
    import reasoning_gym  # here, because it is an optional dependency and takes five seconds to import

    size = 2 * count  # the data set draws words with repetition
    items = reasoning_gym.create_dataset(
        "spell_backward", min_word_len=3, max_word_len=7, seed=seed, size=size
    )
    words: dict[str, str] = {}
    for item in items:
        words.setdefault(item["metadata"]["word"].lower(), item["answer"].lower())
        if len(words) == count:
            return [{"prompt": f"{word}>", "answer": answer} for word, answer in words.items()]
    raise ValueError(f"reasoning-gym gave {len(words)} different words in {size} draws; {count} are needed.")
