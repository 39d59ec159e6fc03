"""verifiers plays the episode, and the policy is its model."""

from pathlib import Path

import pytest

from prefect_rlhf.rlhf_tasks.user_code.episodes import Episode
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
HERE = Path(__file__).parent
GAME, SUMS, TOOLED = (
    f"verifiers:{HERE}/{name}"
    for name in ("guessing_tasks.py:Guessing", "rubric_tasks.py:Sums", "tool_tasks.py:Tooled")
)


@pytest.fixture(autouse=True)
def package(installed):
    return installed("verifiers")


def test_the_environments_own_user_answers_each_turn(table, rows):
    made = rows(GAME, 3)
    assert [row["start"] for row in made] == [0, 1, 2]
    assert made[0]["prompt"] == [{"role": "user", "content": "guess: "}]
    game = table(GAME)
    assert game.play(made[1], "3", "2") == [("lower", 0.0, False), ("", 1.0, True)]
    assert game.play(made[1], "1", "1") == [("higher", 0.0, False), ("", 0.0, True)]
    together = game.process.answers([Episode(n, row, 7, ["2"]) for n, row in enumerate(made)])
    assert [tuple(each) for each in together] == [
        ("lower", 0.0, False),
        ("", 1.0, True),
        ("higher", 0.0, False),
    ]


def test_rewards_are_the_sum_of_the_rubrics_and_rows_end_with_the_tasks(table, rows):
    made = rows(SUMS, 10)
    assert [row["prompt"] for row in made] == [
        [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{n} + {n}"}] for n in range(3)
    ]
    sums = table(SUMS)
    assert sums.play(made[2], "4") == [("", 1.5, True)]
    assert sums.play(made[2], "It is 4.") == [("", 0.0, True)]
    assert sums.play(made[2], "5") == [("", 0.5, True)]


def test_a_row_of_another_task_is_refused(table, rows):
    first, second, _ = rows(SUMS, 3)
    with pytest.raises(RewardError, match=r"at start 1, not with the row's prompt"):
        table(SUMS).play({**first, "start": second["start"]}, "0")


def test_tools_are_offered_called_and_a_malformed_call_is_answered(table, rows):
    _, row, _ = rows(TOOLED, 3)
    assert [tool["function"]["name"] for tool in row["tools"]] == ["calc_double"]
    called = '<tool_call>{"name": "calc_double", "arguments": {"number": %s}}</tool_call>'
    first, second, last = table(TOOLED).play(row, called % "21", called % '"x"', "2")
    assert first == ([{"name": "calc_double", "id": "call00000", "content": "42", "outcome": ""}], 0.0, False)
    assert second[0][0]["content"].startswith("error: the argument 'number' must be")
    assert last == ("", 1.0, True)
