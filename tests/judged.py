"""Answers for rewards to judge, of rows in TRL's, verl's and OpenRLHF's shapes. Import as `tests.judged`."""

import json
from typing import Any

from prefect_rlhf.rlhf_tasks.user_code.forms import Answers


def answers(*rows: dict[str, Any], completions: list[str]) -> Answers:
    texts = [json.dumps(row) for row in rows]
    read = [f"<s>{row['prompt']}" for row in rows]
    return Answers.of_columns(texts, completions, [[1] * len(c) for c in completions], read)


SUMS = answers(
    {"prompt": "What is 3 + 4?", "ground_truth": "7", "task": "add"},
    {"prompt": "What is 10 + 5?", "ground_truth": "15", "task": "add"},
    {"prompt": "What is 9 - 8?", "ground_truth": "1", "task": "subtract"},
    completions=["7", "no", "it is 1"],
)
VERL = answers(
    *(
        {
            "prompt": [{"role": "user", "content": "?"}],
            "data_source": "second/sums",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"index": i, "task": "add" if i else "subtract"},
        }
        for i, truth in enumerate(("7", "15"))
    ),
    completions=["7", "no"],
)
LABELLED = answers(
    {"prompt": "p", "label": "7"},
    {"prompt": [{"role": "user", "content": "q"}], "label": "x"},
    completions=["7", "no"],
)
