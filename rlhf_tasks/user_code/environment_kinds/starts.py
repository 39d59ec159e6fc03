"""How the environments of packages begin: by a row that `prefect-rlhf rows` has made."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any

from prefect_rlhf.rlhf_tasks.config.packages import PACKAGES, refusal
from prefect_rlhf.rlhf_tasks.user_code.child import Caller, importing
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError, raised, shortened
from prefect_rlhf.rlhf_tasks.user_code.forms import module_at

START = "start"
"""Column of a row: what the environment begins with, as its kind defines it; most often a seed."""
Message = Mapping[str, Any]
Row = dict[str, Any]


def factory_of(location: str) -> Callable[..., Any] | None:
    """What makes the environments of a package at `kind:name`; None where a location has no such kind.

    Raises RewardError where the package is missing, or is of another version.
    """
    kind, _, name = location.partition(":")
    return partial(_module(location, kind).Environment, name) if kind in PACKAGES else None


def _module(location: str, kind: str) -> Any:
    if reason := refusal(kind):
        raise RewardError(f"environment {location}: {reason}")
    return import_module(f"{__package__}.{kind}")


class Rows:
    """What a process answers that makes rows of an environment. begin: `factory`, `kwargs`"""

    def __init__(self, begin: Mapping[str, Any], caller: Caller) -> None:
        location = begin["factory"]
        self._who = who = f"environment {location}"
        kind, _, self._name = location.partition(":")
        self.loop = asyncio.Runner()
        self._kwargs = caller.secrets.resolved(who, begin["kwargs"])
        with importing(who):
            starts = getattr(_module(location, kind), "starts", None)
        if starts is None:
            raise RewardError(f"{who}: it begins with rows of yours (docs/how-to/environments.md).")
        self._starts = starts

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """`count` rows, from the start `first` on; fewer where the environment has no more."""
        try:
            made = self._starts(self._name, self._kwargs, request["first"])
            if isinstance(made, AsyncIterator):
                return {"rows": self.loop.run(_first(made, request["count"]))}
            return {"rows": list(islice(made, request["count"]))}
        except Exception as error:  # noqa: BLE001  the environment may raise anything
            raise raised(f"{self._who}: its beginning", error, "") from None


async def _first(made: AsyncIterator[Row], count: int) -> list[Row]:
    rows: list[Row] = []
    async for row in made:
        rows.append(row)
        if len(rows) == count:
            break
    return rows


def row_of(start: Any, messages: Sequence[Message], **more: Any) -> dict[str, Any]:
    """A row: what an environment begins with, and what the policy then reads first."""
    return {"prompt": list(messages), START: start, **more}


def refuse_other_prompt(row: Mapping[str, Any], messages: Sequence[Message]) -> None:
    """Raises ValueError where the policy has read something else than what the environment says first."""
    prompt = row["prompt"]
    if START in row and (prompt if isinstance(prompt, str) else written(prompt)) != written(messages):
        raise ValueError(
            f"it begins with {shortened(repr(written(messages)), 80)} at start {row[START]!r}, not with the row's "
            "prompt. Make the rows anew with `prefect-rlhf rows`, for these kwargs and this version of the package."
        )


def written(messages: Sequence[Message]) -> str:
    """Messages as one text, for models without a chat template."""
    return "\n\n".join(str(each["content"]) for each in messages)


def named(name: str, what: str) -> Any:
    """What is at `file.py:name` or `module:name`; None for a name without a place. Raises ValueError."""
    place, colon, attribute = name.rpartition(":")
    if not colon:
        return None
    found = getattr(module_at(place, "environments"), attribute, None)
    if not callable(found):
        raise ValueError(f"{place} has no {what} {attribute!r}.")
    return found
