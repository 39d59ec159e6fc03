"""Sections of how responses are drawn and judged, in training and in evaluations. Torch-free."""

import math
import re
import shlex
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from prefect_rlhf.rlhf_tasks.config.functions import PickledFunction, located
from prefect_rlhf.rlhf_tasks.config.packages import PACKAGES
from prefect_rlhf.rlhf_tasks.config.row_objects import rows_or
from prefect_rlhf.rlhf_tasks.config.settings import (
    MOST_ITERATIONS,
    MOST_SECONDS,
    MOST_SEQS,
    MOST_TOKENS,
    Settings,
)
from prefect_rlhf.rlhf_tasks.system.reading import shown


def _has_words(value: str) -> str:
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise ValueError(f"{value} is no command: {error}") from None
    if not words:
        raise ValueError("the command is empty")
    return value


CommandLine = Annotated[str, AfterValidator(_has_words)]
"""A program and its arguments, quoted as for a shell."""

ROLLOUT = "trl:"
"""Begins the place of a `rollout_func` of TRL's."""


def _rollout(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """A command; that of a function itself is where the function is."""
    if isinstance(value, PickledFunction):
        return value
    if not callable(value):
        return validate(value)
    place = located(value)
    if not isinstance(place, PickledFunction):
        return shlex.quote(f"{ROLLOUT}{place}")
    command = PickledFunction(f"{ROLLOUT}{place}")
    command.function, command.content = place.function, place.content
    return command


MOST_REQUESTS = 4096  # of an agent
MOST_STOPS = 32  # strings, and ids, that end a response
MOST_STOP_BYTES = 256  # of all stop strings: the table that finds them has a row for each


class SamplingConfig(Settings):
    """How responses are sampled."""

    max_completion_length: int = Field(
        gt=0, le=MOST_TOKENS, description="Maximum tokens of a response, including the end token."
    )
    segment_tokens: int | None = Field(
        default=None,
        gt=0,
        description="Draw responses in segments of so many tokens, until enough have ended to fill the batch; the "
        "others continue in the next iteration, with its weights. Default: each response is drawn to its "
        "end.",
    )
    temperature: float = Field(default=1.0, ge=0, description="Divides the logits; 0 is greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Probability mass that is kept; 1 keeps all.")
    top_k: int = Field(
        default=0, ge=0, le=2**31 - 1, description="Number of tokens that are kept; 0 keeps all."
    )
    min_new_tokens: int = Field(
        default=0,
        ge=0,
        le=MOST_TOKENS,
        description="Least tokens of a response: before these, no end token is drawn, and no stop string ends it.",
    )
    stop: tuple[int | str, ...] = Field(
        default=(),
        max_length=2 * MOST_STOPS,
        description="What ends a response besides the model's own end tokens: strings, and tokens by their ids. The "
        "token that completes a string is its last token and stays whole.",
    )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids of tokens that end a response besides the model's own end tokens."""
        return tuple(each for each in self.stop if isinstance(each, int))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end a response."""
        return tuple(each for each in self.stop if isinstance(each, str))

    @field_validator("stop", mode="before")
    @classmethod
    def _strings_and_ids(cls, value: Any) -> Any:
        """Ids and strings sorted, each once: the order in which they are named does not make another run."""
        several = [value] if isinstance(value, int | str) else value
        if not isinstance(several, list | tuple):
            raise ValueError(f"give strings and ids of tokens, found {shown(value)}")
        for each in several:
            is_id = isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 2**31
            if not (is_id or (isinstance(each, str) and each)):
                raise ValueError(f"give strings and ids of tokens, from 0 on, found {shown(each)}")
        return (
            *sorted({each for each in several if isinstance(each, int)}),
            *sorted({each for each in several if isinstance(each, str)}),
        )

    @model_validator(mode="after")
    def _responses_can_end(self) -> Self:
        if self.min_new_tokens > self.max_completion_length:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} exceeds max_completion_length={self.max_completion_length}. "
                "Lower the one or raise the other."
            )
        if self.segment_tokens is not None and self.segment_tokens >= self.max_completion_length:
            raise ValueError(
                f"segment_tokens={self.segment_tokens} cuts no response of max_completion_length="
                f"{self.max_completion_length}. Lower it or leave it out."
            )
        size = sum(len(string.encode(errors="replace")) for string in self.stop_strings)
        if size > MOST_STOP_BYTES:
            raise ValueError(
                f"the strings in stop have {size} bytes together, more than {MOST_STOP_BYTES}. Name fewer or shorter "
                "ones."
            )
        return self


class EvaluationConfig(Settings):
    """Evaluation on held-out rows during a training run: the model as it then is answers them, and the answers are
    scored by the run's rewards; or it is asked how likely the rows' own completions are.
    """

    data: Annotated[Annotated[str, Field(min_length=1)], WrapValidator(rows_or)] = Field(
        description="Held-out rows: a data set on the Hub with its split, or files, read as those of data.train are.",
    )
    every: int = Field(
        default=1,
        gt=0,
        le=MOST_ITERATIONS,
        description="Iterations from one evaluation to the next; the last iteration always has one.",
    )
    on_start: bool = Field(
        default=False,
        description="Also evaluate before the first iteration, as step 0 (TRL's eval_on_start).",
    )
    loss: bool = Field(
        default=False,
        description="Also the loss on the rows' completions, as of supervised fine-tuning: eval/loss.",
    )
    max_completion_length: int | None = Field(
        default=None,
        gt=0,
        le=MOST_TOKENS,
        description="Maximum tokens of an answer; default: sampling.max_completion_length.",
    )
    temperature: float = Field(default=0.0, ge=0, description="Divides the logits; 0 is greedy.")
    num_generations: int = Field(default=1, gt=0, le=MOST_SEQS, description="Answers to each row.")
    keep_best: int = Field(
        default=0,
        ge=0,
        le=MOST_ITERATIONS,
        description="Snapshots of the highest eval/reward (without rewards: of the lowest eval/loss) that are kept "
        "besides keep_last. With 1 or more, the run's model is exported from the best of its evaluated snapshots, "
        "with 0 from the last snapshot.",
    )

    def is_due(self, iteration: int, total_iterations: int) -> bool:
        """Whether an iteration, counted from 0, ends with an evaluation."""
        return (iteration + 1) % self.every == 0 or iteration + 1 == total_iterations


def _located(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, PickledFunction):
        return value  # with its code, which a plain string has not
    return located(value) if callable(value) else validate(value)


class RewardConfig(Settings):
    """A reward: a Python function, or an HTTP service that computes it."""

    function: Annotated[
        Annotated[str, Field(pattern=r"^[^:]+:[^\W\d]\w*$")] | None, WrapValidator(_located)
    ] = Field(
        default=None,
        description="Where it is: `module:function`, `file.py:function` or `builtin:NAME`; in Python also the "
        "function itself; give this or url.",
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
    body: Literal["own", "openrlhf"] = Field(
        default="own",
        description="What is sent to a url. own: prompts, completions and columns; openrlhf: query, prompts and "
        "labels, as to OpenRLHF's remote_rm_url.",
    )
    only: dict[str, tuple[str | int, ...]] = Field(
        default_factory=dict,
        description="Column -> values: rows with other values in it are not judged. `rewards: {by: COLUMN, VALUE: "
        "[...]}` says it for several rewards.",
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

    @model_validator(mode="before")
    @classmethod
    def _of_a_function(cls, value: Any) -> Any:
        """A function alone is a reward without further settings."""
        return {"function": value} if callable(value) else value

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
            (("headers", "answers_per_request", "allow_private", "body"), f"function={self.function}")
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
    def asks_a_role(self) -> bool:
        """Whether it is the built-in judge and names no service: then the run's role `judge` replies."""
        return self.function == "builtin:judge" and self.kwargs.get("url") is None

    @property
    def arguments(self) -> Mapping[str, Any]:
        """What it is given, which may name secrets."""
        return self.kwargs if self.url is None else self.headers


def routed(value: Any) -> Any:
    """The list of rewards that `{by: COLUMN, VALUE: [...], ...}` stands for; anything else as it is.

    A reward under several values is one that judges the rows of each. Raises ValueError.
    """
    if not isinstance(value, Mapping):
        return value
    column, routes = value.get("by"), {name: each for name, each in value.items() if name != "by"}
    if not isinstance(column, str) or not routes:
        raise ValueError(
            f"give a list of rewards, or by: COLUMN and a list for each of its values, found {shown(value)}"
        )
    every: list[tuple[Any, list[Any]]] = []
    for of_value, rewards in routes.items():
        if not isinstance(rewards, list | tuple) or not rewards:
            raise ValueError(f"{of_value}: give a list of rewards, found {shown(rewards)}")
        for reward in rewards:
            if not (callable(reward) or isinstance(reward, Mapping)):
                raise ValueError(
                    f"{of_value}: a reward is a mapping such as {{function: ...}}, found {shown(reward)}"
                )
            if isinstance(reward, Mapping) and "only" in reward:
                raise ValueError(
                    f"{of_value}: a reward under by: {column} has no `only` of its own. Leave it out"
                )
            values = next((values for same, values in every if same == reward), None)
            if values is None:
                every.append((reward, values := []))
            values.append(of_value)
    return [
        {**({"function": reward} if callable(reward) else reward), "only": {column: values}}
        for reward, values in every
    ]


TURNS = (
    "turns/read_again",
    "turns/count",
    "turns/observed",
    "throughput/think_s",
    "throughput/longest_think_s",
)
"""Metrics of responses of several turns, means of a response: tokens that were read again, since others took the room
in the cache; its turns; tokens of observations; seconds that its environment took to answer. The last one is of a
rank's response that waited longest for answers, or, where all wait for all, of the longest answer to each turn, added
up."""


class EnvironmentConfig(Settings):
    """What answers the model turn by turn: an object of the user's for each response, with `reset(row, seed)` and
    `step(text) -> (observation, reward, done)`."""

    factory: str = Field(
        pattern=rf"^([^:]+:[^\W\d]\w*|({'|'.join(PACKAGES)}):\S+)$",
        description="The class or function that makes one: `module:name`, `file.py:name` or `builtin:NAME`; or an "
        f"environment of a package, by its name there: {', '.join(f'`{kind}:NAME`' for kind in PACKAGES)}.",
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
    together: bool = Field(
        default=True,
        description="Whether all of a rank's responses wait until the environments have answered all of a turn. If "
        "not, each continues when it is answered: log-probabilities then differ by rounding from run to run, and a "
        "resumed run has other bits.",
    )

    @property
    def name(self) -> str:
        """Its name in metrics: `rewards/<name>/mean`. Of an environment behind a URL, its kind."""
        return (self.kind if "://" in self.factory else None) or re.split("[:/]", self.factory)[-1]

    @property
    def kind(self) -> str | None:
        """Of an environment of a package, the key of its package in PACKAGES."""
        kind = self.factory.partition(":")[0]
        return kind if kind in PACKAGES else None

    @property
    def arguments(self) -> Mapping[str, Any]:
        """What it is given, which may name secrets."""
        return self.kwargs

    def turns_of(self, tokens: float) -> int:
        """The turns of a response of so many tokens, as the planner counts them: as many as these fill, or, where a
        turn has no bound, `max_turns`."""
        fill = tokens if self.max_turn_tokens is None else tokens / self.max_turn_tokens
        return min(self.max_turns, max(1, math.ceil(fill)))


class AgentConfig(Settings):
    """A program of the user's that plays an episode for each response: it asks the policy by OpenAI's API."""

    command: Annotated[CommandLine, WrapValidator(_rollout)] = Field(
        description="The program with its arguments. It reads the row as JSON on standard input, asks "
        'OPENAI_BASE_URL with OPENAI_API_KEY, and may end its output with {"reward": NUMBER}. Or '
        "`trl:file.py:function`: a rollout_func of TRL's; in Python also the function itself.",
    )
    at_once: int = Field(default=16, gt=0, le=1024, description="Agents that a rank runs at the same time.")
    max_requests: int = Field(
        default=64, gt=0, le=MOST_REQUESTS, description="Answers that an agent may ask for; one more fails."
    )
    timeout_s: float = Field(
        default=600.0,
        gt=0,
        le=MOST_SECONDS,
        description="Seconds of an episode, from the agent's start to its exit, drawing included.",
    )

    @property
    def words(self) -> list[str]:
        """The program and its arguments."""
        return shlex.split(self.command)

    @property
    def rollout(self) -> str | None:
        """Where a rollout_func of TRL's is, which plays in place of a program."""
        first, *others = self.words
        return None if others or not first.startswith(ROLLOUT) else first.removeprefix(ROLLOUT)

    @property
    def name(self) -> str:
        """Its name in metrics: `rewards/agent/mean`."""
        return "agent"

    @property
    def arguments(self) -> Mapping[str, Any]:
        """It is given none: it inherits the environment."""
        return {}


class McpConfig(Settings):
    """A server of tools that speaks MCP."""

    command: CommandLine | None = Field(
        default=None, description="Starts it, and speaks with it by standard input and output."
    )
    url: str | None = Field(
        default=None,
        pattern=r"^https?://[^/?#\s@]+([/?][^\s#]*)?$",
        max_length=2000,
        description="Where it listens (streamable HTTP).",
    )
    per_episode: bool = Field(
        default=False,
        description="Each response has its own server, or connection to the url, from its first call to its end; a "
        "response that is cut has it until the next batch.",
    )

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError(f"give either command or url, found {'both' if self.url else 'neither'}")
        return self

    @property
    def words(self) -> tuple[str, ...]:
        """The command's program and its arguments; none for a url."""
        return tuple(shlex.split(self.command or ""))


class ToolConfig(Settings):
    """What the model may call: a Python function, the methods of a class, or what a server offers."""

    function: str | None = Field(
        default=None,
        pattern=r"^[^:]+:[^\W\d]\w*$",
        description="Where it is: `module:function`, `file.py:function` or `builtin:NAME`. Its docstring and types "
        "make the schema that the model reads. Of a class, each method without _ is a tool, and each response has "
        "an instance.",
    )
    mcp: McpConfig | None = Field(
        default=None,
        description="A server of tools; its package is `prefect-rlhf[mcp]`. All responses of a process of tools "
        "share it, but for per_episode.",
    )
    kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments that the model does not give; of a class, of its instances; of a server, variables of "
        "its command's environment or headers of its url. Name a secret as {env: VARIABLE} or "
        "{block: PREFECT_SECRET}.",
    )

    @model_validator(mode="after")
    def _is_a_function_or_a_server(self) -> Self:
        if (self.function is None) == (self.mcp is None):
            raise ValueError(
                f"give either function or mcp, found {'neither' if self.mcp is None else 'both'}"
            )
        for key, value in self.kwargs.items() if self.mcp is not None else ():
            if isinstance(value, dict) and [*value] == ["block"]:
                raise ValueError(
                    f"kwargs.{key} names a Prefect block, but a server is asked for its tools before blocks are "
                    "read. Name an environment variable: {env: VARIABLE}"
                )
            if not isinstance(value, str) and not (isinstance(value, dict) and [*value] == ["env"]):
                raise ValueError(
                    f"kwargs.{key}={value!r} is no text, as a server's variables and headers are"
                )
        return self

    @property
    def parts(self) -> tuple[str, ...]:
        """Where its code may be: a module or file, or the parts of a command."""
        if self.mcp is not None:
            return self.mcp.words
        return (self.where.rpartition(":")[0],)

    @property
    def where(self) -> str:
        """Names it, for sentences."""
        return self.function or f"mcp {self.mcp and (self.mcp.url or self.mcp.command)}"

    @property
    def arguments(self) -> Mapping[str, Any]:
        """What it is given, which may name secrets."""
        return self.kwargs


class RewardModelScore(Settings):
    """How the reward model's raw score s enters the sum: weight * clip((s - mean) / std, -clip, clip)."""

    weight: float = Field(default=1.0, description="Factor of the normalised score.")
    mean: float = Field(default=0.0, description="Subtracted from the raw score.")
    std: float = Field(default=1.0, gt=0, description="Divides the centred score.")
    clip: float | None = Field(
        default=None, gt=0, description="Bound of the normalised score; default: none."
    )
