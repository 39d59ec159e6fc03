"""Rewards that are built in: `function: builtin:NAME`. docs/extending.md says what each gives.

Each is a function of TRL's form. It checks its arguments, the columns it needs and the packages it uses before it
judges, so that a run finds what is wrong by calling it without answers. All its faults are RewardErrors.
"""

from rlhf_tasks.rewards.builtin.answers import exact_match, math_verify, numeric_answer, reasoning_gym
from rlhf_tasks.rewards.builtin.shape import format, length
from rlhf_tasks.rewards.builtin.unit_tests import unit_tests

__all__ = [
    "exact_match",
    "format",
    "length",
    "math_verify",
    "numeric_answer",
    "reasoning_gym",
    "unit_tests",
]
