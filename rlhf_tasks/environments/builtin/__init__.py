"""Environments that are built in: `factory: builtin:NAME`. docs/data-and-rewards.md says what each does."""

from rlhf_tasks.environments.builtin.calculator import Calculator
from rlhf_tasks.environments.builtin.guessing import GuessingGame

__all__ = ["Calculator", "GuessingGame"]
