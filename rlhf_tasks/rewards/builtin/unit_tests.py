"""Whether code that a model has written passes the row's tests, in a sandbox."""

import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from rlhf_tasks.rewards.builtin.judged import column_of, number, texts
from rlhf_tasks.rewards.builtin.sandbox import SANDBOXES, ProgramLimits, refuse_sandbox, runs_through
from rlhf_tasks.rewards.forms import RewardError

TESTS = ("tests", "test", "test_list", "unit_tests", "reward_model")
_BLOCK = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)


def unit_tests(
    completions: Sequence[Any],
    column: str | None = None,
    sandbox: str = "bwrap",
    limit_s: float = 10.0,
    memory_bytes: int = 1 << 30,
    at_once: int = 2,
    **columns: Any,
) -> list[float]:
    """1 where the code in an answer passes all tests of its row, else 0.

    The code is the answer's last block between ``` and ```, or else the whole answer. Tests are Python, as text or a
    list of texts, run after the code: they pass if none raises.
    sandbox       bwrap: without files of the user, network and environment; process: only limits, for trusted models
    limit_s       seconds that one answer may take, memory_bytes: that it may use
    at_once       answers that are run at the same time
    """
    tests = column_of("unit_tests", columns, column, known=TESTS)
    if sandbox not in SANDBOXES:
        raise RewardError(
            f"reward builtin:unit_tests: sandbox={sandbox!r} is not one of {', '.join(SANDBOXES)}."
        )
    limits = ProgramLimits(
        number("unit_tests", "limit_s", limit_s, 0.1),
        int(number("unit_tests", "memory_bytes", memory_bytes, 1 << 26)),
    )
    threads = int(number("unit_tests", "at_once", at_once, 1))
    refuse_sandbox(sandbox)

    def passes(pair: tuple[str, Any]) -> float:
        return float(runs_through([code_of(pair[0]), *pair[1]], sandbox, limits))

    pairs = [
        (text, _listed(value, place))
        for place, (text, value) in enumerate(zip(texts(completions), tests, strict=True))
    ]
    with ThreadPoolExecutor(threads, "unit_tests") as pool:
        return list(pool.map(passes, pairs))


def code_of(answer: str) -> str:
    """The code in an answer."""
    blocks = _BLOCK.findall(answer)
    return blocks[-1] if blocks else answer


def _listed(value: Any, place: int) -> list[str]:
    """The tests of a row: a text, a list, or JSON of a list."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError):
            value = json.loads(value)
    listed = [value] if isinstance(value, str) else value
    if isinstance(listed, Mapping) or not listed or not all(isinstance(test, str) for test in listed):
        raise RewardError(
            "reward builtin:unit_tests: the row has no tests: a text of Python, or a list of them.",
            place=place,
        )
    return list(listed)
