"""The processes beside a rank that run the user's environments, as the rank sees them."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from prefect_rlhf.rlhf_tasks.config.sampling import Scores
from prefect_rlhf.rlhf_tasks.data.chat_template import TokenizerError
from prefect_rlhf.rlhf_tasks.data.tokenizer import Observations
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

    What is answered depends neither on the number of processes nor on which of them answers first.
    blocks  name of a Prefect Secret block -> its value
    """

    def __init__(self, config: RunConfig, blocks: Mapping[str, str] | None = None) -> None:
        self._parts: list[_Part] = []
        if isinstance(config, Scores) and config.environment is not None:
            self._parts = [_Part(config, dict(blocks or {})) for _ in range(config.reward_processes)]
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
        pending = [
            self._threads.submit(part.answers, some)
            for part, some in zip(self._parts, of_parts, strict=True)
            if some
        ]
        wait(pending)
        answers = iter([each.result() for each in pending])  # the first part's error, where several have one
        by_part = [iter(next(answers)) if some else iter(()) for some in of_parts]
        return [next(by_part[episode.sample % len(by_part)]) for episode in episodes]

    def close(self) -> None:
        """End the processes and all that they have started, whatever they are doing. A request in progress fails."""
        for part in self._parts:
            part.process.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for part in self._parts:
            part.process.end()


class _Part:
    """One process, which plays its part of the episodes.

    A new process is given all turns of the batch again, each with the time of a turn. Where a process is lost while
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
            self._n_lost, self._replays_s = 0, _replays_s(self._config)
        try:
            try:
                return self._asked(episodes, begins)
            except Lost as error:
                since_s = time.monotonic()
                answers = self._answered_again(episodes, error, since_s + self._replays_s)
                self._replays_s -= time.monotonic() - since_s
                return answers
        except RewardError:
            self.process.end()
            raise

    def _answered_again(
        self, episodes: Sequence[Episode], error: Lost, until_s: float
    ) -> list[Answer | FailedAnswer]:
        """The answers of new processes, after one was lost. until_s: time.monotonic() until which this may take."""
        lost: dict[int, FailedAnswer] = {}
        while True:
            self.process.end()
            if error.place is not None:
                if not self._skips or self._n_lost == MOST_LOST:
                    raise error
                lost[error.place] = FailedAnswer(str(error))
                self._n_lost += 1
            others = [each for each in episodes if each.sample not in lost]
            searches = error.place is None and not isinstance(error, Killed)
            try:
                answers = iter(self._replayed(others, searches, error, until_s))
            except Lost as again:
                if isinstance(error, Killed) and isinstance(again, Killed):
                    raise
                error = again
            else:
                if searches:
                    raise error  # over none of them alone
                return [lost.get(each.sample) or next(answers) for each in episodes]

    def _replayed(
        self, episodes: Sequence[Episode], one_by_one: bool, error: Lost, until_s: float
    ) -> list[Answer | FailedAnswer]:
        """The answers to all turns of the episodes once more, the last ones returned. error: for which they are."""
        last: list[Answer | FailedAnswer] = []
        for some in [[each] for each in episodes] if one_by_one else [episodes]:
            answers: list[Answer | FailedAnswer] = []
            for number in range(1, len(some[0].texts) + 1) if some else ():
                if time.monotonic() + self._config.reward_timeout_s + ENDING_S > until_s:
                    raise RewardError(
                        f"{error} Its batch cannot be played again in {self._replays_s:.0f} s, which is all that "
                        f"{TIMEOUT_KEY} and environment.max_turns allow.",
                        error.traceback,
                    )
                answers = self._asked([each._replace(texts=each.texts[:number]) for each in some])
            last += answers
        return last

    def _asked(self, episodes: Sequence[Episode], begins: bool = False) -> list[Answer | FailedAnswer]:
        """The answers to one turn. begins: a batch. Raises RewardError, and Lost where the process is lost."""
        reply = self.process.ask({"begins": begins, "episodes": episodes})
        return [FailedAnswer(*each) if len(each) == 1 else Answer(*each) for each in reply["answers"]]
