"""The calculator."""

import pytest

from prefect_rlhf.rlhf_tasks.user_code.builtin_environments import Calculator, value_of


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("-(7 - 10) ** 2", "-9"),
        ("7 // 2 + 7 % 2", "4"),
        ("1 / 3", "0.3333333333"),
        ("2 ** 0.5", "1.414213562"),
        ("1e3", "1000"),
        ("1 / 0", "error: division by zero"),
        ("10 ** 10 ** 10", "error: too large"),
        ("9 ** 9 ** 9 % 2", "error: too large"),
        ("1e300 * 1e300", "error: too large"),
        ("(-8) ** 0.5", "error: no arithmetic expression"),
        ("0 ** -1", "error: division by zero"),
        ("__import__('os').getpid()", "error: no arithmetic expression"),
        ("[1][0]", "error: no arithmetic expression"),
        ("True + 1", "error: no arithmetic expression"),
        ("1 +", "error: no arithmetic expression"),
        ("", "error: no arithmetic expression"),
        ("(" * 150, "error: no arithmetic expression"),
        ("1" * 201, "error: more than 200 characters"),
    ],
)
def test_an_expression_has_a_value_or_a_fault_in_words(expression, value):
    assert value_of(expression) == value


def test_a_marked_expression_is_answered_and_the_last_number_judged():
    calculator = Calculator()
    calculator.reset({"prompt": "17 * 23?", "answer": "1,391.0"}, 0)
    assert calculator.step("so <calc>17 * 23</calc>\n") == (" = 391 ", 0.0, False)
    assert calculator.step("first 391, no: 1391") == ("", 1.0, True)
    assert calculator.step("391") == ("", 0.0, True)
    assert calculator.step("<calc>1</calc> is one") == ("", 0.0, True), "a turn ends with what it asks"


def test_a_row_may_leave_the_judgement_to_a_reward():
    calculator = Calculator()
    calculator.reset({"prompt": "p"}, 0)
    assert calculator.step("4") == ("", 0.0, True)
    with pytest.raises(ValueError, match="the row's answer 'many' is no number"):
        calculator.reset({"prompt": "p", "answer": "many"}, 0)
