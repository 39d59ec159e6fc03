"""Sections of what scores responses: functions, services, an environment, a reward model. Torch-free."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    Discriminator,
    Field,
    Tag,
    field_validator,
)

from rlhf_tasks.config.settings import MOST_SECONDS, MOST_SEQS, MOST_TOKENS, Settings


class RewardSource(Settings):
    """What rewards of both kinds have in common."""

    weight: float = Field(default=1.0, description="Factor of its value in the score.")
    per: Literal["sequence", "step", "token"] = Field(
        default="sequence",
        description="It gives an answer a number, or a list: [token, number] of each step, or each token's number.",
    )
    concurrency: int = Field(
        default=64,
        gt=0,
        le=4096,
        description="Calls of an async function, or requests to a url, at the same time.",
    )
    cache: bool = Field(
        default=False,
        description="Keep values in the run folder: an equal answer to an equal row is not judged again.",
    )


class RewardFunction(RewardSource):
    """A Python reward."""

    function: str = Field(
        pattern=r"^[^:]+:[A-Za-z_]\w*$",
        description="Where it is: `module:function`, `file.py:function` or `builtin:NAME`.",
    )
    kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Further keyword arguments; name a secret as {env: VARIABLE} or {block: PREFECT_SECRET}.",
    )

    @property
    def name(self) -> str:
        """The reward's name in metrics: `rewards/<name>/mean`."""
        return self.function.rpartition(":")[2]

    @property
    def location(self) -> str:
        """Where it is, for sentences."""
        return self.function

    @property
    def arguments(self) -> Mapping[str, Any]:
        """What it is given, which may name secrets."""
        return self.kwargs


class RewardService(RewardSource):
    """A reward that an HTTP service computes."""

    url: str = Field(
        pattern=r"^https?://[^/?#\s@]+([/?][^\s#]*)?$",
        max_length=2000,
        description="Where answers are sent, as a POST of JSON; no other address is asked.",
    )
    headers: dict[str, Any] = Field(
        default_factory=dict,
        description="Further headers; name a secret as {env: VARIABLE} or {block: PREFECT_SECRET}.",
    )
    answers_per_request: int = Field(default=64, gt=0, le=MOST_SEQS, description="Answers of one request.")
    request_timeout_s: float = Field(
        default=30.0, gt=0, le=MOST_SECONDS, description="Seconds that one request may take."
    )
    retries: int = Field(
        default=3, ge=0, le=20, description="Further tries where the service fails or is busy."
    )
    allow_private: bool = Field(
        default=False, description="Allow an address on this machine or in a private network."
    )

    @field_validator("url")
    @classmethod
    def _names_host_and_port(cls, value: str) -> str:
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

    @property
    def name(self) -> str:
        """The reward's name in metrics: the last word of the path, else the host."""
        words = [word for word in re.split(r"\W+", self.url.partition("//")[2].partition("?")[0]) if word]
        return words[-1] if "/" in self.url.partition("//")[2].rstrip("/") else "_".join(words)

    @property
    def location(self) -> str:
        """Where it is, for sentences."""
        return self.url

    @property
    def arguments(self) -> Mapping[str, Any]:
        """What it is given, which may name secrets."""
        return self.headers


FUNCTION_REWARD, SERVICE_REWARD = "function-reward", "service-reward"  # tags


def _kind_of_reward(value: Any) -> str:
    is_service = "url" in value if isinstance(value, Mapping) else isinstance(value, RewardService)
    return SERVICE_REWARD if is_service else FUNCTION_REWARD


Reward = Annotated[
    Annotated[RewardFunction, Tag(FUNCTION_REWARD)] | Annotated[RewardService, Tag(SERVICE_REWARD)],
    Discriminator(_kind_of_reward),
]


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
    max_observation_tokens: int | None = Field(
        default=None,
        gt=0,
        le=MOST_TOKENS,
        description="Most tokens of an observation: the run ends at a longer one; default: "
        "sampling.max_completion_length.",
    )
    turn_timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=MOST_SECONDS,
        description="Seconds for the answers to one turn of a rank's batch.",
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
