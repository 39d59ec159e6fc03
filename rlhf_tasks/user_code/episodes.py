"""Plays episodes: one environment of the user's for each sequence, in the process that runs these (child.py)."""

import asyncio
import inspect
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from prefect_rlhf.rlhf_tasks.config.packages import PACKAGES
from prefect_rlhf.rlhf_tasks.user_code.child import (
    MARGIN_S,
    UNTIL_S,
    Caller,
    allow_many_files,
    importing,
    late_ones,
)
from prefect_rlhf.rlhf_tasks.user_code.environment_kinds.starts import factory_of
from prefect_rlhf.rlhf_tasks.user_code.errors import (
    RewardError,
    at_line,
    late_message,
    raised,
    shortened,
    traced,
)
from prefect_rlhf.rlhf_tasks.user_code.forms import as_float, module_at, unwrapped
from prefect_rlhf.rlhf_tasks.user_code.tools.episode import ToolEpisode, tool_episodes

METHODS = ("reset", "step")
TIMEOUT_KEY = "reward_timeout_s"


class Episode(NamedTuple):
    """A sequence that waits for its environment's answer.

    sample  its global id
    row     its row of the data, the prompt included
    seed    of everything random in the environment
    texts   of all its turns so far; the last one is to be answered
    said    `Answer.digest` of the answers to those before it, if that is known: those of turns that are played again
            must be the same
    """

    sample: int
    row: Mapping[str, Any]
    seed: int
    texts: Sequence[str]
    said: Sequence[int] = ()


class Answer(NamedTuple):
    """An environment's answer to a turn: what the policy reads next, a reward, whether the episode is over.

    observation  text; of tools (tools.py), an answer to each call
    """

    observation: str | Sequence[Mapping[str, str]]
    reward: float
    done: bool

    @property
    def digest(self) -> int:
        """A number that other answers do not have, but by chance."""
        return zlib.crc32(json.dumps(self).encode())


class FailedAnswer(NamedTuple):
    """In place of an answer where failed samples are skipped: a sentence that says how the environment failed."""

    reason: str


class Environments:
    """The environments of one process, each with the number of turns that it has answered.

    begin  `factory`: `module:name`, `file.py:name` or `builtin:NAME` of a class or a factory; `kwargs`: what that is
           called with; `tools` and `tool_format`: of the tools that are the environment instead, if any; `skips`:
           an episode in which the environment fails has a FailedAnswer, else it is a fault
    Raises RewardError where the factory is not there.
    """

    def __init__(self, begin: Mapping[str, Any], caller: Caller) -> None:
        allow_many_files()  # episodes may have connections and processes of their own
        self._caller, self._skips = caller, begin["skips"]
        self._name = f"environment {begin['factory']}"
        self._kwargs = caller.secrets.resolved(self._name, begin["kwargs"])
        has_tools = bool(begin["tools"])
        self._answers_calls = has_tools or begin["factory"].partition(":")[0] in PACKAGES
        with importing(self._name):
            self._factory = (
                tool_episodes(begin["tools"], begin["tool_format"], caller)
                if has_tools
                else factory_of(begin["factory"]) or self._factory_at(*begin["factory"].rsplit(":", 1))
            )
        # Sample -> its environment, the turns that this has answered, and the seed: an evaluation's samples have the
        # numbers of others.
        self._running: dict[int, tuple[Any, int, int]] = {}
        self._open = 0  # episodes that wait for their answers
        self._closing = set[asyncio.Future[None]]()  # episodes whose servers are being ended

    def _factory_at(self, place: str, name: str) -> Callable[..., Any]:
        factory = getattr(module_at(place, "environments"), name, None)
        if factory is None:
            raise RewardError(f"{self._name}: {place} has no {name!r}. Name a class or a function.")
        if not callable(factory):
            raise RewardError(f"{self._name}: {name!r} is neither a class nor a function.")
        return factory

    async def answered(self, request: Mapping[str, Any], say: Callable[[Mapping[str, Any]], None]) -> None:
        """Say the answer to a request's episode: `sample`, and `answer` as a list.

        request  `episode`; or `begins`: a new batch begins, so that environments are dropped but for those
                 of these samples
        Raises RewardError, whose `place` is the sample, where the episode fails or is late; where such are skipped,
        only where no environment could be made.
        """
        if "begins" in request:
            continued = set(request["begins"])
            for sample in self._running.keys() - continued:
                self._leave(self._running.pop(sample)[0])
            return
        episode = Episode(*request["episode"])
        until_s, timeout_s = request["until_s"], request["timeout_s"]
        # Tools answer before the turn is late:
        UNTIL_S.set(until_s - MARGIN_S - min(MARGIN_S, timeout_s / 10))
        is_over = False

        async def answer() -> None:
            nonlocal is_over
            answered = await self._answer(episode)
            if not is_over:  # said before another episode's code runs, which may take long or end the process
                is_over = True
                say({"sample": episode.sample, "answer": answered})

        task = asyncio.ensure_future(answer())
        late = await late_ones([task], until_s - MARGIN_S)
        if task not in late:
            task.result()  # raises what it failed with
            return
        if is_over:
            return
        is_over = True
        where = at_line(late[task], self._file)
        message = late_message(f"{self._name}: step", timeout_s, where, TIMEOUT_KEY)
        failed = self._failed(RewardError(message, traced(late[task]), episode.sample))
        say({"sample": episode.sample, "answer": failed})

    def _failed(self, error: RewardError) -> FailedAnswer:
        if not self._skips:
            raise error
        return FailedAnswer(self._caller.sentence(error))

    async def _answer(self, episode: Episode) -> Answer | FailedAnswer:
        """The answer to an episode's last turn.

        An environment that is not here, as after its process was lost, is started again and given all turns again.
        """
        called = ""

        async def call(environment: Any, method: str, *arguments: Any) -> Any:
            nonlocal called
            called = method
            place = episode.sample if self._open == 1 else None
            returned = self._caller.call(method, place, getattr(environment, method), *arguments)
            return await returned if inspect.isawaitable(returned) else returned

        self._open += 1
        environment, *known = self._running.pop(episode.sample, (None, 0, 0))
        answered = len(episode.texts) - 1
        try:
            if environment is None or known != [answered, episode.seed]:
                self._leave(environment)
                environment, answered = self._made(), 0
                begun = await call(environment, "reset", dict(episode.row), episode.seed)
                if begun is not None:
                    raise RewardError(
                        f"{self._name}: reset returned {shown(begun)}. What the policy reads first is the row's "
                        "prompt: return nothing."
                    )
            answer = self._checked(await call(environment, "step", episode.texts[answered]))
            for turn in range(answered + 1, len(episode.texts)):
                if episode.said and answer.digest != episode.said[turn - 1]:
                    raise RewardError(
                        f"{self._name}: played again, it answered turn {turn} of an episode otherwise than before. "
                        "Let all that is random in it come from `seed`."
                    )
                answer = self._checked(await call(environment, "step", episode.texts[turn]))
        except RewardError as error:
            failed = RewardError(str(error), error.traceback, episode.sample)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001  the user's code may raise anything, SystemExit among it
            failed = raised(f"{self._name}: {called or 'making it'}", error, self._file, episode.sample)
        else:
            if not answer.done:
                self._running[episode.sample] = (environment, len(episode.texts), episode.seed)
            return answer
        finally:
            self._open -= 1
            if episode.sample not in self._running:
                self._leave(environment)
        if not called:  # it could not be made, for this sample as for any other
            raise failed
        return self._failed(failed)

    def _leave(self, environment: Any) -> None:
        """Have an episode end what it has started. Nobody waits for it: that takes seconds which a turn does not
        have."""
        if isinstance(environment, ToolEpisode):
            closing = asyncio.ensure_future(environment.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    @property
    def _file(self) -> str:
        """The user's source file; "" where Python does not know it."""
        try:
            return inspect.getsourcefile(inspect.unwrap(self._factory)) or ""
        except TypeError:
            return ""

    def _made(self) -> Any:
        made = self._factory(**self._kwargs)
        missing = [name for name in METHODS if not callable(getattr(made, name, None))]
        if missing:
            raise RewardError(
                f"{self._name}: {type(made).__name__} has no method {missing[0]!r}. Give it "
                "reset(row, seed) and step(text)."
            )
        return made

    def _checked(self, returned: Any) -> Answer:
        who = f"{self._name}: step"
        if not isinstance(returned, tuple | list) or len(returned) != len(Answer._fields):
            raise RewardError(f"{who} returned {shown(returned)}. Return (observation, reward, done).")
        observation, reward, done = returned
        if not isinstance(observation, str) and not self._answers_calls:
            raise RewardError(f"{who} returned the observation {shown(observation)}: not a text.")
        number = as_float(unwrapped(reward))
        if not math.isfinite(number):
            raise RewardError(f"{who} returned the reward {shown(reward)}: not a finite number.")
        done = unwrapped(done)
        if not isinstance(done, bool | int):
            raise RewardError(f"{who} returned done={shown(done)}: neither True nor False.")
        return Answer(observation, number, bool(done))


def shown(value: Any) -> str:
    """A value, for sentences."""
    return shortened(repr(value), 80)
