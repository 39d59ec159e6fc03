"""Episodes: one environment for each sequence, from a user's class or factory; what its methods may return.

An observation becomes the tokens that the policy reads next, within the configuration's bounds.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_tasks.config.base import Scores
from rlhf_tasks.data.chat_template import TokenizerError
from rlhf_tasks.data.observations import Observations
from rlhf_tasks.rewards.forms import RewardError, as_float, module_at, shortened, unwrapped

METHODS = ("reset", "step")


class Episode(NamedTuple):
    """A sequence that waits for its environment's answer.

    sample  its global id
    row     its row of the data, the prompt included
    seed    of everything random in the environment
    texts   of all its turns so far; the last one is to be answered
    """

    sample: int
    row: Mapping[str, Any]
    seed: int
    texts: Sequence[str]


class Answer(NamedTuple):
    """An environment's answer to a turn: what the policy reads next, a reward, whether the episode is over."""

    observation: str
    reward: float
    done: bool


class FailedAnswer(NamedTuple):
    """In place of an answer where failed samples are skipped: a sentence that says how the environment failed."""

    reason: str


class Played:
    """The environments of one process, each with the number of turns that it has answered.

    location  `module:name`, `file.py:name` or `builtin:NAME` of a class or a factory
    Raises RewardError when it is not there. What the user's module raises while it is imported is not caught.
    """

    def __init__(self, location: str, kwargs: Mapping[str, Any]) -> None:
        place, _, name = location.rpartition(":")
        found = getattr(module_at(place, "environments"), name, None)
        if found is None:
            raise RewardError(f"environment {location}: {place} has no {name!r}. Name a class or a function.")
        if not callable(found):
            raise RewardError(f"environment {location}: {name!r} is neither a class nor a function.")
        self._location, self._factory, self._kwargs = location, found, kwargs
        self._running: dict[int, tuple[Any, int]] = {}

    @property
    def file(self) -> str:
        """The user's source file; "" where Python does not know it."""
        try:
            return inspect.getsourcefile(inspect.unwrap(self._factory)) or ""
        except TypeError:
            return ""

    def forget(self) -> None:
        """Drop all environments, as a new batch begins."""
        self._running.clear()

    async def answer(self, episode: Episode, at: Callable[[str], None]) -> Answer:
        """The answer to an episode's last turn.

        at  is told of each method before it is called
        An environment that is not here, as after its process was lost, is begun anew and given all turns again.
        Raises RewardError for what is no answer, and whatever the environment raises.
        """
        environment, answered = self._running.pop(episode.sample, (None, 0))
        if environment is None or answered != len(episode.texts) - 1:
            environment, answered = self._made(), 0
            at("reset")
            begun = environment.reset(dict(episode.row), episode.seed)
            begun = await begun if inspect.isawaitable(begun) else begun
            if begun is not None:
                raise RewardError(
                    f"{self._name('reset')} returned {shown(begun)}. What the policy reads first is the row's "
                    "prompt: return nothing."
                )
        returned = None
        for text in episode.texts[answered:]:
            at("step")
            returned = environment.step(text)
            returned = await returned if inspect.isawaitable(returned) else returned
        found = self._checked(returned)
        if not found.done:
            self._running[episode.sample] = (environment, len(episode.texts))
        return found

    def _made(self) -> Any:
        made = self._factory(**self._kwargs)
        missing = [name for name in METHODS if not callable(getattr(made, name, None))]
        if missing:
            raise RewardError(
                f"environment {self._location}: {type(made).__name__} has no method {missing[0]!r}. Give it "
                "reset(row, seed) and step(text)."
            )
        return made

    def _checked(self, returned: Any) -> Answer:
        if not isinstance(returned, tuple | list) or len(returned) != len(Answer._fields):
            raise RewardError(
                f"{self._name('step')} returned {shown(returned)}. Return (observation, reward, done)."
            )
        observation, reward, done = returned
        if not isinstance(observation, str):
            raise RewardError(
                f"{self._name('step')} returned the observation {shown(observation)}: not a text."
            )
        number = as_float(unwrapped(reward))
        if not math.isfinite(number):
            raise RewardError(
                f"{self._name('step')} returned the reward {shown(reward)}: not a finite number."
            )
        done = unwrapped(done)
        if not isinstance(done, bool | int):
            raise RewardError(f"{self._name('step')} returned done={shown(done)}: neither True nor False.")
        return Answer(observation, number, bool(done))

    def _name(self, method: str) -> str:
        return f"environment {self._location}: {method}"


def shown(value: Any) -> str:
    """A value, for sentences."""
    return shortened(repr(value), 80)


def observed(observations: Observations, config: Scores, text: str, prompt: Any, last: int) -> list[int]:
    """The token ids of an observation.

    prompt, last  see `Observations.ids`
    Raises RewardError where the tokenizer or the chat template cannot write it, and where it has too many tokens.
    """
    environment = config.environment
    assert environment is not None, "the run has no environment"
    try:
        ids = observations.ids(text, prompt, last)
    except TokenizerError as error:
        raise RewardError(f"environment {environment.factory}: {error}") from None
    most = environment.max_observation_tokens or config.sampling.max_completion_length
    if len(ids) > most:
        raise RewardError(
            f"environment {environment.factory}: an observation has {len(ids)} tokens, but {most} are allowed. "
            "Shorten it, or raise environment.max_observation_tokens or sampling.max_completion_length."
        )
    return ids
