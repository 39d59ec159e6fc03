"""Tools that are built in: `function: builtin:NAME`. docs/how-to/tools.md says how they are used."""

import asyncio
import time

from prefect_rlhf.rlhf_tasks.user_code.builtin_environments import value_of
from prefect_rlhf.rlhf_tasks.user_code.child import UNTIL_S
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError
from prefect_rlhf.rlhf_tasks.user_code.sandbox import SANDBOXES, ProgramLimits, output_of, refuse_sandbox

__all__ = ["calculator", "python"]


def calculator(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** and brackets, for example (3 + 4) * 2.
    """
    return value_of(expression)


async def python(
    code: str, *, sandbox: str = "bwrap", limit_s: float = 10.0, memory_bytes: int = 1 << 30
) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The whole program. Nothing is kept from one program to the next.
        sandbox: bwrap or process, as for builtin:unit_tests.
        limit_s: Seconds that a program may take.
        memory_bytes: Bytes that a program may use.
    """
    if sandbox not in SANDBOXES:
        raise RewardError(f"tool builtin:python: sandbox={sandbox!r} is not one of {', '.join(SANDBOXES)}.")
    refuse_sandbox(sandbox, "tool builtin:python")

    def output() -> str:  # it may have waited for a thread
        left_s = min(limit_s, UNTIL_S.get() - time.monotonic())
        return output_of(code, sandbox, ProgramLimits(max(left_s, 0.0), memory_bytes))

    return await asyncio.to_thread(output)
