"""Dataset keys by sample id."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from prefect_rlhf.flows.demo import write_model_folder
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.algorithms.examples import prepared_rows
from prefect_rlhf.rlhf_tasks.algorithms.functions import fetch as fetch_samples
from prefect_rlhf.rlhf_tasks.data.tokenizer import Tokenizer
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleBatch

ROWS = [{"prompt": f"p{i}", "completion": f"c{i}", "chosen": "y", "rejected": "n", "k": i} for i in range(5)]
BY_TYPE: dict[str, dict[str, Any]] = {
    "ppo": {
        "sampling": {"max_completion_length": 4},
        "rewards": [{"function": "m:f"}],
        "total_iterations": 1,
    },
    "grpo": {
        "sampling": {"max_completion_length": 4},
        "rewards": [{"function": "m:f"}],
        "num_generations": 2,
        "total_iterations": 1,
    },
    "rollout": {"sampling": {"max_completion_length": 4}, "num_generations": 2},
    "sft": {"total_iterations": 1},
    "reward_model": {"total_iterations": 1},
    "kto": {"total_iterations": 1, "batch_size": 4, "num_mini_batches": 2},
}


@pytest.fixture
def fetch(tmp_path: Path) -> Any:
    write_model_folder(tmp_path / "model")
    data = tmp_path / "rows.jsonl"

    def run(kind: str, ids: list[int], rows: list[dict[str, Any]] = ROWS) -> tuple[SampleBatch, Any]:
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        document = {
            "type": kind,
            "models": {"actor": str(tmp_path / "model")},
            "data": {"train": str(data)},
            "output_dir": str(tmp_path / "runs"),
        }
        config = make_config({**document, **BY_TYPE[kind]})
        tokenizer = Tokenizer.from_folder(tmp_path / "model")
        return fetch_samples(prepared_rows(config), config, ids), tokenizer

    return run


def texts(batch: SampleBatch, key: str, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(part.tolist()) for part in batch[key].split()]


def test_the_samples_of_a_group_have_one_prompt_of_the_shuffled_order(fetch: Any):
    batch, tokenizer = fetch("grpo", list(range(20)))
    groups = texts(batch, "prompt_ids", tokenizer)
    assert groups[::2] == groups[1::2]
    assert groups[::2] == texts(fetch("ppo", list(range(10)))[0], "prompt_ids", tokenizer)


def test_prompts_come_with_their_columns_in_an_order_of_each_epoch(fetch: Any):
    batch, tokenizer = fetch("ppo", list(range(10)))
    prompts = texts(batch, "prompt_ids", tokenizer)
    assert sorted(prompts[:5]) == sorted(prompts[5:]) == [f"p{i}" for i in range(5)]
    assert [json.loads(text)["prompt"] for text in batch["columns"].texts()] == prompts
    alone, _ = fetch("ppo", [7])
    assert texts(alone, "prompt_ids", tokenizer) == [prompts[7]]


def test_rollouts_read_in_file_order_with_all_samples_of_a_prompt_together(fetch: Any):
    batch, tokenizer = fetch("rollout", list(range(12)))
    assert texts(batch, "prompt_ids", tokenizer) == [f"p{i}" for i in (0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 0, 0)]


def test_completions_come_with_a_mask_of_what_is_learned(fetch: Any):
    batch, tokenizer = fetch("sft", [0, 1, 2])
    for ids, mask in zip(batch["input_ids"].split(), batch["response_mask"].split(), strict=True):
        assert mask.tolist() == [False, False, True, True, True]
        assert ids[-1] == tokenizer.eos_id
        assert tokenizer.decode(ids[mask].tolist())[0] == "c"


def test_pairs_have_both_answers_behind_the_prompt(fetch: Any):
    batch, tokenizer = fetch("reward_model", [3])
    (chosen,), (rejected,) = (texts(batch, key, tokenizer) for key in ("chosen_ids", "rejected_ids"))
    assert chosen[0] == "p"
    assert (chosen[2:], rejected[2:]) == ("y", "n")
    assert chosen[:2] == rejected[:2]


def test_the_margin_of_a_pair_is_a_number_of_its_own(fetch: Any):
    batch, _ = fetch("reward_model", [0, 1])
    assert (batch["margin"].values.dtype, batch["margin"].values.tolist()) == (torch.float64, [0.0, 0.0])


def test_a_mismatched_answer_is_that_of_the_sample_before_in_the_mini_batch(fetch: Any):
    batch, tokenizer = fetch("kto", list(range(8)))
    own, other = texts(batch, "input_ids", tokenizer), texts(batch, "mismatched_ids", tokenizer)
    assert sorted({text[2:] for text in own}) == ["n", "y"]
    for sample in range(8):
        assert other[sample] == own[sample][:2] + own[sample ^ 1][2:], "mini-batches have two samples"
    assert batch["desirable"].values.tolist() == [text[2:] == "y" for text in own]
    alone, _ = fetch("kto", [5])
    assert texts(alone, "mismatched_ids", tokenizer) == [other[5]], "whatever else this head reads"


def test_a_mismatched_sequence_is_cut_where_it_is_longer_than_any_row(fetch: Any):
    rows = [
        {"prompt": "a", "completion": "long" * 4, "label": True},
        {"prompt": "long" * 4, "completion": "b", "label": False},
    ]
    batch, tokenizer = fetch("kto", [0, 1, 2, 3], rows)
    found = set(zip(texts(batch, "mismatched_ids", tokenizer), batch["mismatched_ids"].lengths, strict=True))
    assert found >= {("long" * 4 + "lo", 18), ("ab", 3)}
