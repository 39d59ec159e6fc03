"""Environments that are built in: `factory: builtin:NAME`. docs/extending.md says how they are used."""

from rlhf_tasks.environments.builtin.calculator import Calculator
from rlhf_tasks.environments.builtin.guessing import GuessingGame

__all__ = ["Calculator", "GuessingGame"]
