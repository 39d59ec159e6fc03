"""The helper processes beside a rank that run the user's environments, as the rank sees them."""

import functools
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from rlhf_tasks.config.base import RunConfig, Scores
from rlhf_tasks.config.rewards import EnvironmentConfig
from rlhf_tasks.environments.episodes import Answer, Episode, FailedAnswer
from rlhf_tasks.environments.helper import TIMEOUT_KEY
from rlhf_tasks.rewards.forms import RewardError
from rlhf_tasks.rewards.helper import late_message
from rlhf_tasks.rewards.helper_process import HelperOwner, HelperProcess, TooLarge
from rlhf_tasks.rewards.process import ENDING_S, MOST_LOST

SERVE = "rlhf_tasks.environments.helper:serve"
MOST_KILLED = 2
"""As often as all its turns last, a batch may be played again where a lost process is not to be skipped: it is given
the turns again after it was killed from outside, and to find the sample over which it was lost."""


def longest_play_s(config: Scores) -> float:
    """Seconds that all turns of a batch may take until its environments are reported as late: those of each turn, and
    those of what is played again in new processes. 0 without an environment."""
    if config.environment is None:
        return 0.0
    return _all_turns_s(config.environment) + _replays_s(config.environment, config.on_reward_error == "skip")


def _all_turns_s(environment: EnvironmentConfig) -> float:
    return environment.max_turns * (environment.turn_timeout_s + ENDING_S)


def _replays_s(environment: EnvironmentConfig, skips: bool) -> float:
    """Seconds that all replays of a batch may take together."""
    return (MOST_LOST if skips else MOST_KILLED) * _all_turns_s(environment)


class EnvironmentProcess:
    """One rank's helper processes: `reward_processes` of them, which share out the episodes.

    What is answered depends neither on the number of processes nor on which of them answers first.
    blocks  name of a Prefect Secret block -> its value
    """

    def __init__(self, config: RunConfig, blocks: Mapping[str, str] | None = None) -> None:
        self._parts: list[_EpisodePart] = []
        if isinstance(config, Scores) and config.environment is not None:
            of_part = (config.environment, config.reward_memory_bytes, config.on_reward_error == "skip")
            self._parts = [_EpisodePart(*of_part, dict(blocks or {})) for _ in range(config.reward_processes)]
        self._threads = ThreadPoolExecutor(max(len(self._parts), 1), thread_name_prefix="environments")

    def answers(self, episodes: Sequence[Episode]) -> list[Answer | FailedAnswer]:
        """The environments' answers to the last turn of each episode, in their order.

        All are in the same turn; the first one begins a new batch. Raises RewardError, whose `place` is the
        id of the sample where it is known, when an environment cannot be found, raises, answers no text or number, is
        late or too large, or ends its process. With `on_reward_error: skip`, such an episode's answer is a
        FailedAnswer instead.
        """
        of_parts: list[list[Episode]] = [[] for _ in self._parts]
        for episode in episodes:
            of_parts[episode.sample % len(of_parts)].append(episode)
        asked = [
            self._threads.submit(part.answers, mine)
            for part, mine in zip(self._parts, of_parts, strict=True)
            if mine
        ]
        wait(asked)
        found = iter([each.result() for each in asked])  # the first part's error, where several have one
        by_part = [iter(next(found)) if mine else iter(()) for mine in of_parts]
        return [next(by_part[episode.sample % len(by_part)]) for episode in episodes]

    def close(self) -> None:
        """End the helpers and all that they have started, whatever they are doing. A request in progress fails."""
        for part in self._parts:
            part.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for part in self._parts:
            part.end()


class _EpisodePart(HelperOwner[HelperProcess]):
    """One helper process, which plays its part of the episodes.

    A new process is given all turns of the batch again, each with the time of a turn. Where a process is lost while
    several episodes wait for their answers, nobody knows which of them did it. The next process then plays one
    episode at a time, all its turns, until it is lost over one.

    skips  whether the answer of an episode in which the environment fails is a FailedAnswer, and the others go on
    """

    def __init__(
        self, environment: EnvironmentConfig, most_bytes: int, skips: bool, blocks: Mapping[str, str]
    ) -> None:
        super().__init__()
        self._environment, self._most_bytes, self._skips = environment, most_bytes, skips
        self._blocks = blocks
        # Of the batch:
        self._n_lost = 0  # samples over which a process was lost
        self._replays_s = 0.0  # seconds that are left for replays

    def answers(self, episodes: Sequence[Episode]) -> list[Answer | FailedAnswer]:
        """Answers to some episodes, all in the same turn. Raises RewardError.

        Where failed samples are skipped, the answer of one over which a process is lost is a FailedAnswer, and the
        others are played again: for at most MOST_LOST samples of a batch.
        """
        begins = len(episodes[0].texts) == 1
        if begins:
            self._n_lost, self._replays_s = 0, _replays_s(self._environment, self._skips)
        try:
            try:
                return self._asked(episodes, begins)
            except _EpisodesLost as error:
                since_s = time.monotonic()
                found = self._answered_again(episodes, error, since_s + self._replays_s)
                self._replays_s -= time.monotonic() - since_s
                return found
        except RewardError:
            self.end()
            raise

    def _answered_again(
        self, episodes: Sequence[Episode], error: "_EpisodesLost", until_s: float
    ) -> list[Answer | FailedAnswer]:
        """The answers of new processes, after one was lost. until_s: time.monotonic() until which this may take."""
        lost: dict[int, FailedAnswer] = {}
        while True:
            self.end()
            if error.place is not None:
                if not self._skips or self._n_lost == MOST_LOST:
                    raise error
                lost[error.place] = FailedAnswer(str(error))
                self._n_lost += 1
            going = [each for each in episodes if each.sample not in lost]
            searches = error.place is None and not isinstance(error, _EpisodesKilled)
            try:
                found = self._replayed(going, searches, error, until_s) if going else []
            except _EpisodesLost as again:
                if isinstance(error, _EpisodesKilled) and isinstance(again, _EpisodesKilled):
                    raise
                error = again
            else:
                if searches:
                    raise error  # over none of them alone
                answers = iter(found)
                return [lost.get(each.sample) or next(answers) for each in episodes]

    def _replayed(
        self, episodes: Sequence[Episode], one_by_one: bool, error: "_EpisodesLost", until_s: float
    ) -> list[Answer | FailedAnswer]:
        """The answers to all turns of the episodes once more, the last ones returned. error: for which they are."""
        found: list[Answer | FailedAnswer] = []
        for some in [[each] for each in episodes] if one_by_one else [episodes]:
            answers: list[Answer | FailedAnswer] = []
            for number in range(1, len(episodes[0].texts) + 1):
                if time.monotonic() + self._environment.turn_timeout_s + ENDING_S > until_s:
                    raise RewardError(
                        f"{error} Its batch cannot be played again in {self._replays_s:.0f} s, which is all that "
                        f"{TIMEOUT_KEY} and environment.max_turns allow.",
                        error.traceback,
                    )
                answers = self._asked([each._replace(texts=each.texts[:number]) for each in some])
            found += answers
        return found

    @property
    def _name(self) -> str:
        return f"environment {self._environment.factory}"

    def _asked(self, episodes: Sequence[Episode], begins: bool = False) -> list[Answer | FailedAnswer]:
        """The answers to one turn. begins: a batch. Raises RewardError, and _Lost where the process is lost."""
        if self.closed:
            raise RewardError("the rank's environment process is closed.")
        timeout_s = self._environment.turn_timeout_s
        asked_s = since_s = time.monotonic()
        until_s = asked_s + timeout_s
        helper = self.helper = self.helper or HelperProcess(SERVE, self._name)
        at: tuple[int | None, str, int] = (None, "", 0)
        try:
            if not helper.started:
                of_user = self._environment.model_dump(include={"factory", "kwargs"})
                helper.start({**of_user, "skips": self._skips, "blocks": self._blocks}, until_s)
            request = {
                "begins": begins,
                "episodes": episodes,
                "until_s": until_s,  # time.monotonic(), which is the same in both processes
                "timeout_s": timeout_s,
            }
            look = functools.partial(helper.refuse_large, self._most_bytes)
            helper.lines.send(json.dumps(request), until_s, look)
            while (reply := helper.lines.read(until_s, look)) is not None:
                if "at" in reply:
                    at, since_s = reply["at"], time.monotonic()
                else:
                    return self._read(reply)
        except TimeoutError:
            where, frames = helper.stack()
            late = late_message(self._doing(at[1]), timeout_s, where, TIMEOUT_KEY)
            if time.monotonic() - since_s < timeout_s / 2:  # the batch as a whole is late
                raise RewardError(late, frames, at[0] if at[2] == 1 else None) from None
            raise _lost(late, frames, at) from None
        except TooLarge as error:
            where, frames = helper.stack()
            raise _lost(
                f"{self._doing(at[1])} takes {error.used_bytes / 1e9:.1f} GB of memory{where}; reward_memory_bytes "
                f"allows {self._most_bytes / 1e9:.1f} GB. Mend it or raise reward_memory_bytes.",
                frames,
                at,
            ) from None
        raise self._ended(helper, at)

    def _read(self, reply: Mapping[str, Any]) -> list[Answer | FailedAnswer]:
        if "fault" in reply:
            raise RewardError(reply["fault"], reply["traceback"], reply["sample"])
        return [FailedAnswer(*each) if len(each) == 1 else Answer(*each) for each in reply["answers"]]

    def _ended(self, helper: HelperProcess, at: tuple[int | None, str, int]) -> RewardError:
        """Why the process has ended without a reply: the environment ended it, or it was killed from outside."""
        how = helper.how_it_ended()
        if self.closed:
            return RewardError("the rank's environment process is closed.")
        if how is None:
            return _EpisodesKilled(
                f"the process of {self._name} was killed from outside, as the system does when memory runs out."
            )
        where, frames = helper.written_stack()
        return _lost(f"{self._doing(at[1])} ended its process with {how}{where}.", frames, at)

    def _doing(self, method: str) -> str:
        return f"{self._name}: {method}" if method else self._name


class _EpisodesLost(RewardError):
    """The process has ended, or must be ended, while it answered. place: the sample over which, where it is known."""


class _EpisodesKilled(_EpisodesLost):
    """It was killed from outside, not by what an environment did."""


def _lost(message: str, frames: str, at: tuple[int | None, str, int]) -> RewardError:
    """The error of a process that is lost. at: as the process told it last; no sample: no environment was called"""
    sample, _, n_open = at
    if sample is None:
        return RewardError(message, frames)
    return _EpisodesLost(message, frames, sample if n_open == 1 else None)
