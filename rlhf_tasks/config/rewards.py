"""Sections of what scores responses: functions, services, an environment, a reward model. Torch-free."""

import math
import re
from collections.abc import Mapping
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from rlhf_tasks.config.settings import MOST_SEQS, MOST_TOKENS, Settings


class RewardConfig(Settings):
    """A reward: a Python function, or an HTTP service that computes it."""

    function: str | None = Field(
        default=None,
        pattern=r"^[^:]+:[A-Za-z_]\w*$",
        description="Where it is: `module:function`, `file.py:function` or `builtin:NAME`; give this or url.",
    )
    kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Further keyword arguments of the function; name a secret as {env: VARIABLE} or "
        "{block: PREFECT_SECRET}.",
    )
    url: str | None = Field(
        default=None,
        pattern=r"^https?://[^/?#\s@]+([/?][^\s#]*)?$",
        max_length=2000,
        description="Service to which answers are sent, as a POST of JSON; no other address is asked. A "
        "request may take half of reward_timeout_s.",
    )
    headers: dict[str, Any] = Field(
        default_factory=dict,
        description="Further headers for the url; name a secret as {env: VARIABLE} or {block: PREFECT_SECRET}.",
    )
    weight: float = Field(default=1.0, description="Factor of its value in the score.")
    used_in: Literal["both", "training", "evaluation"] = Field(
        default="both",
        description="Where a training run uses it: in training, in its evaluation, or in both.",
    )
    per: Literal["sequence", "step", "token"] = Field(
        default="sequence",
        description="What it gives for an answer. sequence: a number; step: a list of [token, number], one for each "
        "step; token: a list with a number for each token.",
    )
    concurrency: int = Field(
        default=64,
        gt=0,
        le=4096,
        description="Calls of an async function, or requests to a url, at the same time.",
    )
    answers_per_request: int = Field(
        default=64, gt=0, le=MOST_SEQS, description="Answers of one request to a url."
    )
    allow_private: bool = Field(
        default=False, description="Allow a url on this machine or in a private network."
    )
    cache: bool = Field(
        default=False,
        description="Keep values in the run folder: an equal answer to an equal row is not judged again.",
    )

    @field_validator("url")
    @classmethod
    def _names_host_and_port(cls, value: str | None) -> str | None:
        if value is None:
            return None
        url = urlsplit(value)
        if not url.hostname or url.port == 0:  # reading the port raises ValueError where it is none
            raise ValueError(f"{value} names no host, or the port 0")
        try:
            url.hostname.encode("idna")  # as it is looked up
        except UnicodeError:
            raise ValueError(
                f"{value} names no host: each part between dots has 1 to 63 characters"
            ) from None
        return value

    @model_validator(mode="after")
    def _is_a_function_or_a_service(self) -> Self:
        if (self.function is None) == (self.url is None):
            raise ValueError(
                f"give either function or url, found {'neither' if self.url is None else 'both'}"
            )
        others, what = (
            (("headers", "answers_per_request", "allow_private"), f"function={self.function}")
            if self.url is None
            else (("kwargs",), f"url={self.url}")
        )
        for name in others:
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(f"{name} has no meaning for {what}. Leave it out")
        return self

    @property
    def name(self) -> str:
        """The reward's name in metrics, `rewards/<name>/mean`: the function's; the last word of a url's path, or else
        its host."""
        if self.function is not None:
            return self.function.rpartition(":")[2]
        place = self.location.partition("//")[2]
        words = [word for word in re.split(r"\W+", place.partition("?")[0]) if word]
        return words[-1] if "/" in place.rstrip("/") else "_".join(words)

    @property
    def location(self) -> str:
        """Where it is, for sentences."""
        return self.function or self.url or ""

    @property
    def arguments(self) -> Mapping[str, Any]:
        """What it is given, which may name secrets."""
        return self.kwargs if self.url is None else self.headers


class EnvironmentConfig(Settings):
    """What answers the model turn by turn: an object of the user's for each response, with `reset(row, seed)` and
    `step(text) -> (observation, reward, done)`."""

    factory: str = Field(
        pattern=r"^[^:]+:[A-Za-z_]\w*$",
        description="The class or function that makes one: `module:name`, `file.py:name` or `builtin:NAME`.",
    )
    kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Its keyword arguments; name a secret as {env: VARIABLE} or {block: PREFECT_SECRET}.",
    )
    max_turns: int = Field(
        default=8,
        gt=0,
        le=4096,
        description="Most turns of a response; it is truncated where these do not end it.",
    )
    max_turn_tokens: int | None = Field(
        default=None,
        gt=0,
        le=MOST_TOKENS,
        description="Most tokens that the model draws in a turn; default: what is left of "
        "sampling.max_completion_length, which counts all turns and observations.",
    )

    @property
    def name(self) -> str:
        """Its name in metrics: `rewards/<name>/mean`."""
        return self.factory.rpartition(":")[2]

    @property
    def arguments(self) -> Mapping[str, Any]:
        """What it is given, which may name secrets."""
        return self.kwargs

    def turns_of(self, tokens: float) -> int:
        """The turns of a response of so many tokens, as the planner counts them: as many as these fill, or, where a
        turn has no bound, `max_turns`."""
        fill = tokens if self.max_turn_tokens is None else tokens / self.max_turn_tokens
        return min(self.max_turns, max(1, math.ceil(fill)))


class RewardModelScore(Settings):
    """How the reward model's raw score s enters the sum: weight * clip((s - mean) / std, -clip, clip)."""

    weight: float = Field(default=1.0, description="Factor of the normalised score.")
    mean: float = Field(default=0.0, description="Subtracted from the raw score.")
    std: float = Field(default=1.0, gt=0, description="Divides the centred score.")
    clip: float | None = Field(
        default=None, gt=0, description="Bound of the normalised score; default: none."
    )
