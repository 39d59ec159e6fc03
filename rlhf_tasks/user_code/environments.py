"""The processes beside a rank that run the user's environments, as the rank sees them."""

import select
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from prefect_rlhf.rlhf_tasks.config.sampling import Scores
from prefect_rlhf.rlhf_tasks.data.chat_template import TokenizerError
from prefect_rlhf.rlhf_tasks.data.tokenizer import Observations
from prefect_rlhf.rlhf_tasks.system.child_pipes import LOOK_EVERY_S
from prefect_rlhf.rlhf_tasks.user_code.episodes import TIMEOUT_KEY, Answer, Episode, FailedAnswer
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError
from prefect_rlhf.rlhf_tasks.user_code.process import ENDING_S, MOST_LOST, Killed, Lost, Terms, UserProcess
from prefect_rlhf.rlhf_tasks.user_code.tools.schemas import offered, tool_format

MOST_KILLED = 2
"""As often as all its turns last, a batch may be played again where a lost process is not to be skipped: it is given
the turns again after it was killed from outside, and to find the sample over which it was lost."""


def longest_play_s(config: Scores) -> float:
    """Seconds that all turns of a batch may take until its environments are reported as late: those of each turn, and
    those of what is played again in new processes. 0 without an environment."""
    if config.environment is None:
        return 0.0
    return _all_turns_s(config) + _replays_s(config)


def _all_turns_s(config: Scores) -> float:
    assert config.environment is not None
    return config.environment.max_turns * (config.reward_timeout_s + ENDING_S)


def _replays_s(config: Scores) -> float:
    """Seconds that all replays of a batch may take together."""
    return (MOST_LOST if config.on_reward_error == "skip" else MOST_KILLED) * _all_turns_s(config)


def observed(
    observations: Observations,
    config: Scores,
    text: str | Sequence[Mapping[str, str]],
    prompt: Any,
    last: int,
) -> list[int]:
    """The token ids of an observation: what the policy reads next.

    text, prompt, last  see `Observations.ids`
    Raises RewardError where the tokenizer or the chat template cannot write it, and where it has too many tokens;
    what tools answer may have any number, which ends the response.
    """
    environment = config.environment
    assert environment is not None, "the run has no environment"
    try:
        ids = observations.ids(text, prompt, last)
    except TokenizerError as error:
        raise RewardError(f"environment {environment.factory}: {error}") from None
    most = config.sampling.max_completion_length
    if len(ids) > most and not config.tools:
        raise RewardError(
            f"environment {environment.factory}: an observation has {len(ids)} tokens, but a response at most "
            f"sampling.max_completion_length={most}. Shorten the one or raise the other."
        )
    return ids


class EnvironmentProcess:
    """One rank's processes of environments: `reward_processes` of them, which share out the episodes.

    An episode is submitted when its turn has ended, and answered as soon as its environment answers. What is answered
    depends neither on the number of processes nor on which of them answers first.
    blocks  name of a Prefect Secret block -> its value
    """

    def __init__(self, config: RunConfig, blocks: Mapping[str, str] | None = None) -> None:
        self._parts: list[_Part] = []
        if isinstance(config, Scores) and config.environment is not None:
            self._parts = [_Part(config, dict(blocks or {})) for _ in range(config.reward_processes)]
        self._used = threading.Lock()

    def begin(self, continued: Collection[int] = ()) -> None:
        """Begin a batch: environments are dropped, but for those of samples whose episodes are continued. What was
        not answered is forgotten."""
        with self._used:
            for part in self._parts:
                part.begin(continued)

    def submit(self, episode: Episode) -> None:
        """Have an episode's last turn answered within `reward_timeout_s`. Raises RewardError."""
        with self._used:
            self._parts[episode.sample % len(self._parts)].submit(episode)

    def answered(self, wait_s: float) -> dict[int, Answer | FailedAnswer]:
        """Sample -> the answer to its episode, of those that were answered since. Waits for the first of them, for so
        many seconds at most.

        Raises RewardError, whose `place` is the id of the sample where it is known, when an environment cannot be
        found, raises, answers no text or number, is late or too large, or ends its process. With `on_reward_error:
        skip`, such an episode's answer is a FailedAnswer instead.
        """
        until_s = time.monotonic() + wait_s
        while True:
            with self._used:
                found = {sample: answer for part in self._parts for sample, answer in part.take().items()}
                left_s = until_s - time.monotonic()
                waiting = select.poll()
                for part in self._parts:
                    part.process.watch(waiting)
            if found or left_s <= 0:
                return found
            waiting.poll(min(left_s, LOOK_EVERY_S) * 1000)

    def answers(self, episodes: Sequence[Episode]) -> list[Answer | FailedAnswer]:
        """The answers to some episodes in the same turn, in their order; the first turn begins a batch. Raises as
        `answered` does."""
        if len(episodes[0].texts) == 1:
            self.begin()
        found: dict[int, Answer | FailedAnswer] = {}
        for episode in episodes:
            self.submit(episode)
        while len(found) < len(episodes):
            found |= self.answered(LOOK_EVERY_S)
        return [found[episode.sample] for episode in episodes]

    def close(self) -> None:
        """End the processes and all that they have started, whatever they are doing. Who waits for answers gets a
        RewardError."""
        for part in self._parts:
            part.process.close()
        with self._used:
            for part in self._parts:
                part.process.end()


class _Pending(NamedTuple):
    """An episode that waits for its answer. since_s, until_s: time.monotonic() since when, and until when"""

    episode: Episode
    since_s: float
    until_s: float


class _Part:
    """One process, which plays its part of the episodes.

    A new process is given all turns of an episode again, each with the time of a turn. Where a process is lost while
    several episodes wait for their answers, nobody knows which of them did it. The next process then plays one
    episode at a time, all its turns, until it is lost over one.

    With `on_reward_error: skip` the answer of an episode in which the environment fails is a FailedAnswer, and the
    others continue.
    """

    def __init__(self, config: Scores, blocks: Mapping[str, str]) -> None:
        environment = config.environment
        assert environment is not None, "the run has no environment"
        self._config, self._skips = config, config.on_reward_error == "skip"
        name = f"environment {environment.factory}"
        of_user: dict[str, Any] = environment.model_dump(include={"factory", "kwargs"})
        of_user |= {
            "tools": offered(config),
            "tool_format": tool_format(config) if config.tools else None,
        }
        self.process = UserProcess(
            Terms(
                kind="prefect_rlhf.rlhf_tasks.user_code.episodes:Environments",
                what=name,
                who=lambda method: f"{name}: {method}",
                begin={**of_user, "skips": self._skips, "blocks": blocks},
                timeout_s=config.reward_timeout_s,
                timeout_key=TIMEOUT_KEY,
                most_bytes=config.reward_memory_bytes,
            )
        )
        self._pending: dict[int, _Pending] = {}  # sample -> its episode
        self._played: dict[int, int] = {}  # sample -> turns that the process has been given
        # Of the batch:
        self._n_lost = 0  # samples over which a process was lost
        self._replays_s = 0.0  # seconds that are left for replays
        # Of a replay:
        self._lost: Lost | None = None  # for which it is
        self._since_s = 0.0
        self._again = set[int]()  # samples that are played again
        self._alone: deque[Episode] | None = (
            None  # those that are to be played one at a time; None: all are asked
        )

    def begin(self, continued: Collection[int]) -> None:
        """Begin a batch."""
        if self._pending:  # of a batch that has failed
            self.process.end()
            self._played.clear()
        self._pending, self._lost, self._alone = {}, None, None
        self._played = {sample: turns for sample, turns in self._played.items() if sample in continued}
        self._n_lost, self._replays_s = 0, _replays_s(self._config)
        if self.process.pid is None:
            return
        try:
            self.process.replies()
        except RewardError:  # it has ended since the last batch, over no episode
            self.process.end()
            self._played.clear()
        else:
            self.process.submit({"begins": [*self._played]})

    def submit(self, episode: Episode) -> None:
        """Have an episode's last turn answered."""
        if self._alone is None:
            self._ask(episode)
        else:
            self._alone.append(episode)

    def _ask(self, episode: Episode) -> None:
        now_s, sample = time.monotonic(), episode.sample
        given = self._played.get(sample, 0)  # more than these, where the run has gone back to a commit
        turns = len(episode.texts) - (given if given < len(episode.texts) else 0)
        self._pending[sample] = _Pending(episode, now_s, now_s + turns * self._config.reward_timeout_s)
        self._played[sample] = len(episode.texts)
        self.process.submit({"episode": episode}, self._pending[sample].until_s)

    def take(self) -> dict[int, Answer | FailedAnswer]:
        """Sample -> its answer, of those that have been answered since. Raises RewardError.

        Where failed samples are skipped, the answer of one over which a process is lost is a FailedAnswer, and the
        others are played again: for at most MOST_LOST samples of a batch.
        """
        answers: dict[int, Answer | FailedAnswer] = {}
        try:
            try:
                for reply in self.process.replies():
                    del self._pending[reply["sample"]]
                    self._again.discard(reply["sample"])
                    answer = reply["answer"]
                    answers[reply["sample"]] = FailedAnswer(*answer) if len(answer) == 1 else Answer(*answer)
                self._refuse_late()
            except Lost as error:
                answers |= self._replay(error)
            self._end_replay()
        except RewardError:
            self.process.end()
            self._pending.clear()
            raise
        return answers

    def _refuse_late(self) -> None:
        first = min(self._pending.values(), key=lambda each: each.until_s, default=None)
        if first is not None and time.monotonic() > first.until_s:
            raise self.process.late(first.since_s)

    def _replay(self, error: Lost) -> dict[int, FailedAnswer]:
        """Have a new process play what waits, after one was lost. Returns the answer of the sample that did it, where
        that is known."""
        self.process.end()
        place = error.place if error.place in self._pending else None
        episodes = [each.episode for each in self._pending.values()] + list(self._alone or ())
        self._pending.clear()
        self._played.clear()
        if not episodes:  # it did nothing: the next one is given the turns of those that come
            return {}
        if (place is not None and (not self._skips or self._n_lost == MOST_LOST)) or (
            isinstance(error, Killed) and isinstance(self._lost, Killed)
        ):
            raise error
        if self._lost is None:
            self._since_s = time.monotonic()
        others = [each for each in episodes if each.sample != place]
        self._lost, self._alone = error, None
        self._again = {each.sample for each in others}
        if place is None and not isinstance(error, Killed):
            self._alone = deque(others)
        else:
            for each in others:
                self._play_again(each)
        if place is None:
            return {}
        self._n_lost += 1
        return {place: FailedAnswer(str(error))}

    def _end_replay(self) -> None:
        """Play the next episode alone; or, where all that was to be played again has been, end the replay."""
        if self._lost is None or (
            self._pending if self._alone is not None else self._again & self._pending.keys()
        ):
            return
        if self._alone:
            self._play_again(self._alone.popleft())
        elif self._alone is not None:
            raise self._lost  # over none of them alone
        else:
            self._replays_s -= time.monotonic() - self._since_s
            self._lost = None

    def _play_again(self, episode: Episode) -> None:
        assert self._lost is not None, "a process was lost"
        takes_s = len(episode.texts) * (self._config.reward_timeout_s + ENDING_S)
        if time.monotonic() + takes_s > self._since_s + self._replays_s:
            raise RewardError(
                f"{self._lost} Its batch cannot be played again in {self._replays_s:.0f} s, which is all that "
                f"{TIMEOUT_KEY} and environment.max_turns allow.",
                self._lost.traceback,
            )
        self._ask(episode)
