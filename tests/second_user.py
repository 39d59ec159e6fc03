"""A second user's folder: nothing of it is the demo's or `tests.tiny_runs`'s. Import as `tests.second_user`.

An own tokenizer (trained BPE with word marks, a token before each text, two end tokens, a chat template), an own tiny
Llama in several files, rows in TRL's, verl's and chat shapes, rewards in every documented signature and broken ones,
no reward model. `second_user_rewards/` holds the rewards as files of the user's.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, set_seed

REWARDS = Path(__file__).with_name("second_user_rewards")
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class SecondUser:
    """The files of a user's folder.

    model    a Hugging Face folder
    rewards  a folder of Python files: trl.py, verl.py, openrlhf.py, broken.py
    data     shape -> file of rows: "trl" (text, JSONL), "verl" (messages, Parquet), "chat" (messages, JSONL), "pairs"
             (a right and a wrong answer as messages, Parquet), "turns" (whole conversations of two turns, JSONL)
    """

    folder: Path
    model: Path
    rewards: Path
    data: dict[str, Path]

    def reward(self, location: str, **settings: Any) -> dict[str, Any]:
        """A reward's section of a configuration, from `trl:exact` or the like."""
        file, _, name = location.partition(":")
        return {"function": f"{self.rewards / file}.py:{name}", **settings}

    def ppo(self, *rewards: str | dict[str, Any], data: str = "trl", **changes: Any) -> dict[str, Any]:
        """The document of a PPO configuration; rewards as `reward` takes them, or whole sections."""
        return {
            "type": "ppo",
            "models": {"actor": str(self.model)},
            "data": {"train": str(self.data[data]), "max_prompt_tokens": 200},
            "output_dir": str(self.folder / "runs"),
            "sampling": {"max_completion_length": 8},
            "rewards": [r if isinstance(r, dict) else self.reward(r) for r in rewards or ("trl:exact",)],
            "batch_size": 8,
            "num_mini_batches": 2,
            "total_iterations": 2,
            "optimizer": {"learning_rate": 1e-4},
            **changes,
        }

    def supervised(self, kind: str, data: str, **changes: Any) -> dict[str, Any]:
        """The document of a configuration that learns from rows as they are: sft, reward_model, dpo, kto."""
        return {
            "type": kind,
            "models": {"actor": str(self.model)},
            "data": {"train": str(self.data[data]), "max_prompt_tokens": 200},
            "output_dir": str(self.folder / "runs"),
            "batch_size": 8,
            "total_iterations": 2,
            **changes,
        }

    def write_ppo(self, *rewards: str | dict[str, Any], data: str = "trl", **changes: Any) -> Path:
        """The same as a YAML file; gives its path."""
        path = self.folder / "ppo.yaml"
        path.write_text(yaml.safe_dump(self.ppo(*rewards, data=data, **changes)), encoding="utf-8")
        return path


def second_user(folder: Path) -> SecondUser:
    """Make the folder."""
    model = _write_model(folder / "tiny-sums")
    shutil.copytree(REWARDS, folder / "rewards", ignore=shutil.ignore_patterns("__pycache__"))
    return SecondUser(folder, model, folder / "rewards", _write_rows(folder / "data"))


def _sums(n: int = 40) -> list[tuple[str, str, str]]:
    """(question, answer, task)."""
    rows = []
    for i in range(n):
        a, b = 3 + i * 7 % 23, i * 5 % 11
        task, sign, answer = ("add", "+", a + b) if i % 3 else ("subtract", "-", a - b)
        rows.append((f"What is {a} {sign} {b}?", str(answer), task))
    return rows


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    texts = [f"{question} The answer is {answer}." for question, answer, _ in _sums()]
    alphabet = [chr(code) for code in range(32, 127)] + ["\n"]
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=180, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def _write_model(folder: Path) -> Path:
    tokenizer = _tokenizer()
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    config = LlamaConfig(
        **SIZES,
        vocab_size=tokenizer.get_vocab_size(),
        bos_token_id=ids["<s>"],
        eos_token_id=[ids["</s>"], ids["<|im_end|>"]],
        pad_token_id=ids["<pad>"],
    )
    set_seed(11)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig.from_model_config(config)
    model.save_pretrained(folder, max_shard_size="100KB")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def _write_rows(folder: Path) -> dict[str, Path]:
    """The same questions in five shapes."""
    folder.mkdir()
    files = {
        "trl": folder / "trl.jsonl",
        "verl": folder / "verl.parquet",
        "chat": folder / "chat.jsonl",
        "pairs": folder / "pairs.parquet",
        "turns": folder / "turns.jsonl",
    }
    text, verl, chat, pairs, turns = [], [], [], [], []
    for index, (question, answer, task) in enumerate(_sums()):
        messages = [{"role": "user", "content": question}]
        text.append({"prompt": question, "ground_truth": answer, "task": task})
        verl.append(
            {
                "data_source": "second/sums",
                "prompt": messages,
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": answer},
                "extra_info": {"split": "train", "index": index, "task": task},
            }
        )
        system = {"role": "system", "content": "Answer with a number."}
        chat.append({"prompt": [system, *messages], "label": answer})
        right, wrong = ([{"role": "assistant", "content": said}] for said in (answer, f"{answer}0"))
        pairs.append({"prompt": messages, "chosen": right, "rejected": wrong, "margin": float(index % 3)})
        turns.append({"messages": [system, *messages, *wrong, {"role": "user", "content": "Sure?"}, *right]})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(verl), files["verl"])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(pairs), files["pairs"])
    for name, rows in (("trl", text), ("chat", chat), ("turns", turns)):
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return files
