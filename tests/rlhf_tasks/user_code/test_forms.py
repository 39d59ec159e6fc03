"""How rewards are found and called, and what may come back; in this process, which only tests do."""

from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError
from prefect_rlhf.rlhf_tasks.user_code.forms import TRL, Parameters, Reward, TrainerState, load_reward
from tests.judged import LABELLED, SUMS, VERL, answers

REWARDS = Path(__file__).parents[2] / "second_user_rewards"


def judge(name: str, judged: Any = SUMS, **kwargs: Any) -> list[float | None]:
    file, _, function = name.partition(":")
    reward = load_reward(function, f"{REWARDS / file}.py:{function}", kwargs)
    values = []
    for places in [[n] for n in range(len(judged))] if reward.form.per_answer else [range(len(judged))]:
        arguments = reward.arguments(judged.select(places), TrainerState(0, 1), {})
        values += reward.values(reward.function(**arguments), places, judged)
    for value in values:
        if isinstance(value, RewardError):
            raise value
    return [value for value in values if not isinstance(value, RewardError)]


@pytest.mark.parametrize(
    ("name", "sentence", "place"),
    [
        ("infinite", "reward 'infinite' returned inf: not a finite number.", 0),
        ("nan", "reward 'nan' returned nan: not a finite number.", 2),
        ("nothing", "reward 'nothing' returned None instead of a list of numbers.", None),
        ("short", "reward 'short' returned 1 values for 3 answers.", None),
        ("text", "reward 'text' returned '0.5': not a number.", 0),
        ("number", "reward 'number' returned float instead of a list of numbers.", None),
        ("huge", "returned 1000000000000000000", 0),
        ("nested", "reward 'nested' returned [1.0, 2.0]: not a number.", 0),
        ("no_score", "returned a dict without 'score' (keys: acc).", 0),
        ("missing", "has no function 'missing'.", None),
        ("constant", "'constant' is not a function.", None),
        ("odd", "takes (first, second). Give it the parameters (prompts, completions, **columns).", None),
        ("lacks_a_column", "parameter 'nowhere' is neither a column of the rows (ground_truth, task)", None),
    ],
)
def test_what_cannot_be_a_reward_and_what_is_no_value_is_named(name: str, sentence: str, place: Any):
    with pytest.raises(RewardError) as caught:
        judge(f"broken:{name}")
    assert sentence in str(caught.value)
    assert caught.value.place == place


def test_no_opinion_is_a_value():
    assert judge("broken:no_opinion") == [None] * 3


def test_arguments_that_a_reward_does_not_take_are_refused():
    with pytest.raises(
        RewardError, match=r"has no parameter 'scael', which its kwargs name \(it takes data_source"
    ):
        judge("verl:with_arguments", VERL, scael=3.0)


def test_prompts_of_conversations_are_what_the_model_read_where_a_reward_wants_text():
    assert LABELLED.prompt_texts == ["p", "<s>[{'role': 'user', 'content': 'q'}]"]
    assert LABELLED.prompts[1] == [{"role": "user", "content": "q"}]
    assert judge("openrlhf:as_list", LABELLED) == [1.0, 0.0]


def test_completions_among_the_parameters_show_the_form_of_trl_whatever_the_columns_are_called(
    tmp_path: Path,
):
    file = tmp_path / "mine.py"
    file.write_text("def f(completions, queries, solution_str, **kwargs): return [1.0]")
    reward = load_reward("f", f"{file}:f", {})
    judged = answers({"prompt": "p", "queries": "q", "solution_str": "s"}, completions=["c"])
    arguments = reward.arguments(judged, TrainerState(0, 1), {})
    assert (arguments["completions"], arguments["queries"], arguments["solution_str"]) == (
        ["c"],
        ["q"],
        ["s"],
    )


def test_columns_that_some_rows_lack_are_none():
    mixed = answers({"prompt": "p", "a": 1}, {"prompt": "q", "b": 2}, completions=["x", "y"])
    assert mixed.columns == {"a": [1, None], "b": [None, 2]}


def test_some_answers_are_whole_answers():
    some = SUMS.select([2, 0])
    assert (some.completions, some.columns["task"]) == (["it is 1", "7"], ["subtract", "add"])
    assert (len(some), some.prompt_texts) == (2, ["What is 9 - 8?", "What is 3 + 4?"])


TOKENS = Reward("mine", "m:f", max, Parameters((), (), takes_any=True), TRL, {}, "", per="token")
STEPS = replace(TOKENS, per="step")


def test_a_reward_per_token_gives_a_number_for_each_and_one_per_step_names_the_steps_last_token():
    assert TOKENS.value((1, 0.5, 2), 3) == [1.0, 0.5, 2.0]
    assert TOKENS.value({"score": [0.0, 1.0]}, 2) == [0.0, 1.0]
    assert STEPS.value([[1, 0.5], (3, 2), [3, 1]], 5) == [0.0, 0.5, 0.0, 3.0, 0.0]
    assert STEPS.value([], 2) == [0.0, 0.0]
    assert TOKENS.value(None, 2) is STEPS.value(None, 2) is None


@pytest.mark.parametrize(
    ("reward", "value", "sentence"),
    [
        (TOKENS, 1.0, "returned 1.0 for an answer: with per: token it is a list."),
        (
            TOKENS,
            [1.0],
            "returned 1 numbers for an answer of 3 tokens: with per: token there is one for each",
        ),
        (TOKENS, [1.0, float("nan"), 0.0], "returned nan: not a finite number."),
        (TOKENS, [1.0, None, 0.0], "returned None among an answer's numbers."),
        (STEPS, [[3, 1.0]], "its last token from 0 to 2."),
        (STEPS, [[-1, 1.0]], "its last token from 0 to 2."),
        (STEPS, [[True, 1.0]], "its last token from 0 to 2."),
        (STEPS, [1.0, 2.0, 3.0], "with per: step each step is [token, number]"),
        (STEPS, [[0, "x"]], "returned 'x': not a number."),
    ],
)
def test_what_is_no_value_of_tokens_or_steps_is_named(reward: Reward, value: Any, sentence: str):
    with pytest.raises(RewardError) as caught:
        reward.value(value, 3)
    assert sentence in str(caught.value)


NUMBERS = {
    "an int": 1,
    "a bool": True,
    "a Decimal": Decimal(1),
    "a Fraction": Fraction(1),
    "NumPy's scalar": np.float64(1),
    "NumPy's bool": np.bool_(True),
    "an array without dimensions": np.array(1),
    "an array of one": np.array([1.0]),
    "an array of one, deeper": np.array([[1.0]], dtype=np.float16),
    "a tensor without dimensions": torch.tensor(1),
    "a tensor of one": torch.tensor([1.0]),
    "a tensor that has a gradient": torch.tensor([1.0], requires_grad=True),
    "a bfloat16 tensor": torch.tensor(1, dtype=torch.bfloat16),
    "a list of one": [1.0],
    "a tuple with an array": (np.array([1]),),
    "verl's dict with an array": {"score": np.array([1.0])},
}


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
def test_a_number_may_have_any_form(number: Any):
    whole = replace(TOKENS, per="sequence")
    assert whole.value(number, 3) == 1.0
    assert whole.values([number, None], [0, 2], SUMS) == [1.0, None]
    if not isinstance(number, dict):
        assert TOKENS.value([number, 0, number], 3) == [1.0, 0.0, 1.0]
        assert STEPS.value([[np.int64(2), number]], 3) == [0.0, 0.0, 1.0]


def test_a_batchs_numbers_may_be_an_array_of_any_shape_with_one_for_each():
    whole = replace(TOKENS, per="sequence")
    for returned in (np.ones(3), np.ones((3, 1)), torch.ones(3, 1), [np.array([1.0])] * 3):
        assert whole.values(returned, [0, 1, 2], SUMS) == [1.0, 1.0, 1.0]
    assert STEPS.value(np.array([[0, 0.5], [2, 1.0]]), 3) == [0.5, 0.0, 1.0]
    assert whole.value(np.array([None]), 3) is None


@pytest.mark.parametrize(
    "value",
    ["1", b"1", bytearray(b"1"), np.array(["1"]), np.ones(2), [[1.0, 2.0]], 1j, np.array([np.nan]), []],
)
def test_what_is_not_one_number_is_refused(value: Any):
    with pytest.raises(RewardError, match=r"not a (finite )?number"):
        replace(TOKENS, per="sequence").value(value, 3)
