"""Imports an algorithm's functions on the ranks, where they run."""

from collections.abc import Iterable
from importlib import import_module

from rlhf_tasks.algorithms.registry import Algorithm
from rlhf_tasks.algorithms.shared.context import CallFunction
from rlhf_tasks.user_code.errors import UserCodeError


def load_functions(algorithm: Algorithm, calls: Iterable[str]) -> dict[str, CallFunction]:
    """The function of each call, by the call's name.

    Raises UserCodeError naming the package when they cannot be imported: restarting the rank would not help.
    """
    try:
        module = import_module(algorithm.functions)
        return {call: getattr(module, call) for call in calls}
    except Exception as fault:
        raise UserCodeError(
            f"the functions of the algorithm {algorithm.name!r} of the package {algorithm.package} cannot be "
            f"imported: {type(fault).__name__}: {fault}"
        ) from fault
