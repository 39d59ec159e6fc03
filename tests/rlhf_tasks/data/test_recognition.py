"""What rows are for, told from their columns."""

import pytest

from prefect_rlhf.rlhf_tasks.data.recognition import Columns, recognised
from prefect_rlhf.rlhf_tasks.system.reading import DataError

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
RENAMED = {"question": "prompt", "response": "completion"}
LONG = "Because the sky is blue, and so on. " * 10


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"prompt": "2 + 2", "answer": "4"}, Columns("answers", {}, "answer", is_number=True)),
        ({"prompt": "Capital?", "answer": "Oslo"}, Columns("answers", {}, "answer")),
        (
            {"question": "2 + 2", "answer": f"{LONG}#### 1,234"},
            Columns("answers", {"question": "prompt"}, "answer", is_number=True),
        ),
        ({"problem": "x", "solution": r"so \boxed{7}"}, Columns("answers", {"problem": "prompt"}, "solution", True)),
        (
            {"prompt": MESSAGES[:1], "reward_model": {"style": "rule", "ground_truth": "4"}},
            Columns("answers", {}, "reward_model", is_number=True),
        ),
        ({"chosen": "a", "rejected": "b"}, Columns("pairs")),
        ({"prompt": "x", "chosen": MESSAGES, "rejected": MESSAGES}, Columns("pairs")),
        ({"prompt": "x", "completion": "y", "label": True}, Columns("labels")),
        ({"messages": MESSAGES, "label": "False"}, Columns("labels")),
        ({"question": "x", "response": "y", "label": False}, Columns("labels", RENAMED)),
        ({"messages": MESSAGES}, Columns("completions")),
        ({"conversations": [{"from": "human", "value": "x"}]}, Columns("completions")),
        ({"text": "once upon a time"}, Columns("completions")),
        ({"prompt": "x", "completion": "y"}, Columns("completions")),
        (
            {"Question": "x", "Response": "y"},
            Columns("completions", {"Question": "prompt", "Response": "completion"}),
        ),
        ({"question": "x", "answer": LONG}, Columns("completions", {"question": "prompt", "answer": "completion"})),
        ({"prompt": "x", "topic": "y"}, Columns("prompts")),
        ({"prompt": "x", "answer": None}, Columns("prompts")),
    ],
)  # fmt: skip
def test_columns_say_what_rows_are_for(row, columns):
    assert recognised("rows.jsonl", [row]) == columns


def test_a_label_that_is_a_class_is_a_right_answer():
    rows = [{"prompt": "Good film?", "label": "good"}, {"prompt": "Bad film?", "label": "bad"}]
    assert recognised("rows.jsonl", rows) == Columns("answers", {}, "label")


def test_what_is_not_recognised_is_refused_with_what_there_is_and_what_would_be():
    with pytest.raises(DataError, match=r"rows.csv: its columns \(height, weight\) .* chosen with rejected"):
        recognised("rows.csv", [{"weight": 1, "height": 2}])
