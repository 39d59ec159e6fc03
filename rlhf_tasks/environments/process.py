"""The helper processes beside a rank that run the user's environments, as the rank sees them."""

import functools
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from rlhf_tasks.config.base import RunConfig, Scores
from rlhf_tasks.config.rewards import EnvironmentConfig
from rlhf_tasks.environments.episodes import Answer, Episode, Failed
from rlhf_tasks.environments.helper import TIMEOUT_KEY
from rlhf_tasks.rewards.forms import RewardError
from rlhf_tasks.rewards.helper import late_message
from rlhf_tasks.rewards.helper_process import HelperProcess, TooLarge
from rlhf_tasks.rewards.process import ENDING_S, MOST_LOST

SERVE = "rlhf_tasks.environments.helper:serve"


def longest_play_s(config: Scores) -> float:
    """Seconds that all turns of a batch may take until its environments are reported as late: those of each turn, as
    often as a process is started anew. 0 without an environment."""
    if config.environment is None:
        return 0.0
    times = 1 + (MOST_LOST if config.on_reward_error == "skip" else 0)
    return config.environment.max_turns * times * (config.environment.turn_timeout_s + ENDING_S)


class EnvironmentProcess:
    """One rank's helper processes: `reward_processes` of them, which share out the episodes.

    What is answered depends neither on the number of processes nor on which of them answers first.
    """

    def __init__(self, config: RunConfig) -> None:
        self._parts: list[_Part] = []
        if isinstance(config, Scores) and config.environment is not None:
            of_part = (config.environment, config.reward_memory_bytes, config.on_reward_error == "skip")
            self._parts = [_Part(*of_part) for _ in range(config.reward_processes)]
        self._threads = ThreadPoolExecutor(max(len(self._parts), 1), thread_name_prefix="environments")

    def answers(self, episodes: Sequence[Episode]) -> list[Answer | Failed]:
        """The environments' answers to the last turn of each episode, in their order.

        All must be in their first turn, which begins a new batch, or none. Raises RewardError, whose `place` is the
        id of the sample where it is known, when an environment cannot be found, raises, answers no text or number, is
        late or too large, or ends its process. With `on_reward_error: skip`, an episode in which it did so is Failed
        instead.
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


class _Part:
    """One helper process, started with its first request, and again after it was lost.

    skips  whether an episode in which the environment fails is Failed, and the others go on
    """

    def __init__(self, environment: EnvironmentConfig, most_bytes: int, skips: bool) -> None:
        self._environment, self._most_bytes, self._skips = environment, most_bytes, skips
        self._helper: HelperProcess | None = None
        self._closed = False

    def close(self) -> None:
        """End the helper from any thread; no other starts."""
        self._closed = True
        helper = self._helper  # read once: the asking thread may set it to None meanwhile
        if helper is not None:
            helper.end()

    def end(self) -> None:
        """End the helper and reap it. Called from one thread at a time."""
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.close()

    def answers(self, episodes: Sequence[Episode]) -> list[Answer | Failed]:
        """Answers to some episodes. Raises RewardError.

        Where failed samples are skipped, a process that is lost over one of them is started anew and given all turns
        of the others again, with as much time.
        """
        lost: dict[int, Failed] = {}
        while True:
            try:
                found = iter(self._answered([each for each in episodes if each.sample not in lost]))
            except _Lost as error:
                if not self._skips or len(lost) == MOST_LOST:
                    raise
                lost[error.sample] = Failed(str(error))
            else:
                return [lost.get(each.sample) or next(found) for each in episodes]

    def _answered(self, episodes: Sequence[Episode]) -> list[Answer | Failed]:
        if not episodes:
            return []
        for _ in range(2):
            try:
                found = self._asked(episodes)
            except RewardError:
                self.end()
                raise
            if found is not None:
                return found
            self.end()  # killed from outside: another is given all turns again
        raise RewardError(
            f"the process of {self._name} was killed twice, as the system does when memory runs out."
        )

    @property
    def _name(self) -> str:
        return f"environment {self._environment.factory}"

    def _asked(self, episodes: Sequence[Episode]) -> list[Answer | Failed] | None:
        """The answers; None where the process was killed from outside."""
        if self._closed:
            raise RewardError("the rank's environment process is closed.")
        timeout_s = self._environment.turn_timeout_s
        asked_s = since_s = time.monotonic()
        until_s = asked_s + timeout_s
        helper = self._helper = self._helper or HelperProcess(SERVE)
        at: tuple[int | None, str] = (None, "")
        try:
            if not helper.started:
                of_user = self._environment.model_dump(include={"factory", "kwargs"})
                helper.start({**of_user, "skips": self._skips}, until_s)
            request = {
                "begins": len(episodes[0].texts) == 1,
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
                raise RewardError(late, frames, at[0]) from None
            raise _lost(late, frames, at[0]) from None
        except TooLarge as error:
            where, frames = helper.stack()
            raise _lost(
                f"{self._doing(at[1])} takes {error.used_bytes / 1e9:.1f} GB of memory{where}; reward_memory_bytes "
                f"allows {self._most_bytes / 1e9:.1f} GB. Mend it or raise reward_memory_bytes.",
                frames,
                at[0],
            ) from None
        return self._ended(helper, at)

    def _read(self, reply: Mapping[str, Any]) -> list[Answer | Failed]:
        if "fault" in reply:
            raise RewardError(reply["fault"], reply["traceback"], reply["sample"])
        return [Failed(*each) if len(each) == 1 else Answer(*each) for each in reply["answers"]]

    def _ended(self, helper: HelperProcess, at: tuple[int | None, str]) -> None:
        """None where the process was killed from outside. Raises RewardError where the environment ended it."""
        how = helper.how_it_ended()
        if self._closed:
            raise RewardError("the rank's environment process is closed.")
        if how is None:
            return
        where, frames = helper.written_stack()
        raise _lost(f"{self._doing(at[1])} ended its process with {how}{where}.", frames, at[0])

    def _doing(self, method: str) -> str:
        return f"{self._name}: {method}" if method else self._name


class _Lost(RewardError):
    """The process was ended in the call for one sample."""

    sample: int = -1


def _lost(message: str, frames: str, sample: int | None) -> RewardError:
    """The error of a process that ends, or must be ended. sample: for which it has called the environment last"""
    if sample is None:
        return RewardError(message, frames)
    error = _Lost(message, frames, sample)
    error.sample = sample
    return error
