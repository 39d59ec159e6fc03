"""Environments that are built in: `factory: builtin:NAME`. docs/extending.md says how they are used.

A user's own are in the user's files; how any of them is run is in the folder above.
"""

from rlhf_tasks.environments.builtin.calculator import Calculator
from rlhf_tasks.environments.builtin.guessing import GuessingGame

__all__ = ["Calculator", "GuessingGame"]
