"""Environments that are built in: `factory: builtin:NAME`. docs/how-to/environments.md says how they are used.

The calculator answers a marked expression with its value. The guessing game answers each wrong guess with a hint.
"""

import ast
import math
import operator
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from prefect_rlhf.rlhf_tasks.user_code.builtin_rewards import number_in

__all__ = ["Calculator", "GuessingGame"]

OPEN, CLOSE = "<calc>", "</calc>"
MOST_CHARACTERS = 200  # of an expression
MOST_VALUE = 1e15
"""Larger values, also between steps, are refused: no expression takes long or fills the memory."""

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class Calculator:
    """A turn that ends with `<calc>EXPRESSION</calc>` is answered with the value; any other turn is the answer.

    The reward is that of the answer: 1 where its number, read as the reward numeric_answer does, equals the row's
    column `answer`, else 0. A row may lack that column where a reward of the run judges answers. A fault of the
    expression is answered in words.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Begin with a row. Raises ValueError where its `answer` is no number."""
        answer = row.get("answer")
        self._answer = None if answer is None else number_in(str(answer))
        if answer is not None and self._answer is None:
            raise ValueError(f"the row's answer {answer!r} is no number.")

    def step(self, text: str) -> tuple[str, float, bool]:
        """(the value of the expression, 0, False), or ("", the answer's reward, True)"""
        _, opened, asked = text.rstrip().rpartition(OPEN)
        if opened and asked.endswith(CLOSE):
            return f" = {value_of(asked.removesuffix(CLOSE))} ", 0.0, False
        said = number_in(text)
        right = self._answer is not None and said is not None and said.equals(self._answer)
        return "", float(right), True


def value_of(expression: str) -> str:
    """The value of an expression of numbers, + - * / // % ** and brackets, as text; or why it has none.

    It is read as a syntax tree, of which only these parts are known: nothing in it is run.
    """
    if len(expression) > MOST_CHARACTERS:
        return f"error: more than {MOST_CHARACTERS} characters"
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        return "error: division by zero"
    except _OutOfRange:
        return "error: too large"
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return "error: no arithmetic expression"
    return str(int(value)) if value == int(value) else f"{value:.10g}"


class _OutOfRange(Exception):
    """A value beyond MOST_VALUE."""


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=value) if type(value) in (int, float):
            return _bounded(value)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _BINARY:
            one, other = _value(left), _value(right)
            if isinstance(op, ast.Pow) and one and abs(other * math.log(abs(one))) > math.log(MOST_VALUE):
                raise _OutOfRange
            return _bounded(_BINARY[type(op)](one, other))
        case _:
            raise ValueError("no arithmetic expression")


def _bounded(value: Any) -> float:
    """Raises _TooLarge; ValueError for a complex number, as a power of a negative one may be."""
    if isinstance(value, complex):
        raise ValueError("no real number")
    if not abs(value) <= MOST_VALUE:
        raise _OutOfRange
    return value


class GuessingGame:
    """A number from 1 to `numbers` is to be found in at most `guesses` guesses, one a turn.

    A turn's first whole number is the guess. The hint is "higher" or "lower", as the number is; "number" where the
    turn has none. With 2^g - 1 numbers, who halves what is left always wins in g guesses, and who does not read the
    hints wins in g of these cases at most: 3 of 7 with three guesses.
    The reward is 1 for the number, 0 for anything else. The number is that of the row's column `number`, or drawn.
    """

    def __init__(self, numbers: int = 7, guesses: int = 3) -> None:
        for name, value in (("numbers", numbers), ("guesses", guesses)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1.")
        self._numbers, self._left, self._number = numbers, guesses, 0

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Begin a game. Raises ValueError for a row whose number is none of the game's."""
        number = row.get("number")
        if number is None:
            number = random.Random(seed).randint(1, self._numbers)
        if type(number) is not int or not 1 <= number <= self._numbers:
            raise ValueError(f"the row's number {number!r} must be from 1 to {self._numbers}.")
        self._number = number

    def step(self, text: str) -> tuple[str, float, bool]:
        """(the hint, the reward, whether the game is over)"""
        match = re.search("[0-9]+", text[:1000])
        guess = None if match is None else int(match[0])
        self._left -= 1
        if guess == self._number:
            return "right", 1.0, True
        hint = "number" if guess is None else "higher" if guess < self._number else "lower"
        return f" {hint} ", 0.0, self._left == 0
