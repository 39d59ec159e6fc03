"""Tasks of reasoning-gym: prompts and scores are the package's own."""

import pytest
import reasoning_gym

from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError

pytestmark = pytest.mark.cluster
NAME = "reasoning_gym:chain_sum"
SET = {"seed": 3, "size": 20, "min_terms": 2, "max_terms": 2}


def test_the_scores_are_the_packages_own(table, rows):
    tasks = reasoning_gym.create_dataset("chain_sum", **SET)
    made = rows(NAME, 4, first=5, **SET)
    assert [row["prompt"] for row in made] == [
        [{"role": "user", "content": tasks[place]["question"]}] for place in range(5, 9)
    ]
    game, answer = table(NAME, **SET), tasks[5]["answer"]
    for said in (answer, f"Let me see. <answer>{answer}</answer>", f"<answer>{answer}1</answer>", "no idea"):
        inner = said.partition("<answer>")[2].removesuffix("</answer>") or said
        assert game.play(made[0], said) == [("", tasks.score_answer(inner, tasks[5]), True)]
    assert game.play(made[0], answer) == [("", 1.0, True)]


def test_rows_end_with_the_data_set(rows):
    assert [row["start"] for row in rows(NAME, 10, first=15, **SET)] == [15, 16, 17, 18, 19]


def test_a_row_of_another_set_is_refused(table, rows):
    (row,) = rows(NAME, 1, **SET)
    with pytest.raises(RewardError, match=r"at start 0, not with the row's prompt. Make the rows anew"):
        table(NAME, **SET | {"seed": 4}).play(row, "1")
    with pytest.raises(
        RewardError, match=r"the row has no column 'start'. Make rows with `prefect-rlhf rows`"
    ):
        table(NAME, **SET).play({"prompt": "1 + 1"}, "2")
