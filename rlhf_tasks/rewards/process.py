"""The helper processes beside a rank that run the user's Python rewards, as the rank sees them."""

import contextlib
import functools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_tasks.config.base import RunConfig, Scores
from rlhf_tasks.config.rewards import RewardFunction, RewardService
from rlhf_tasks.rewards.forms import Answers, RewardError, Values
from rlhf_tasks.rewards.helper import late_message
from rlhf_tasks.rewards.helper_process import HelperOwner, HelperProcess, TooLarge

KEPT_VALUES = "reward-values"  # folder in a run folder, of values that rewards with `cache: true` have given
MOST_LOST = 4
"""Of the answers of a batch that a process judges one by one, as many may cost it, where such answers are skipped."""
SEARCH_S = 5.0  # that the search for the answer that a reward fails on may take
ENDING_S = 20.0
"""After its time is over, until a late reward is reported: its stack is asked for and its processes are ended."""


def longest_s(config: Scores) -> float:
    """Seconds that judging a batch may take until its rewards are reported as late: those of `reward_timeout_s`, as
    often as a process is started anew."""
    times = 1 + (MOST_LOST if config.on_reward_error == "skip" else 0)
    return times * (config.reward_timeout_s + ENDING_S)


class Fault(NamedTuple):
    """Why an answer is skipped.

    reward  the name of the reward that failed on it; of all of them where none judges it
    reason  a sentence
    """

    reward: str
    reason: str


@dataclass(frozen=True, slots=True)
class Judged:
    """The rewards' verdict on n answers.

    values  reward -> n values
    logged  reward -> what it logged by `log_extra` (column -> n values) and `log_metric` (name -> number)
    faults  index of an answer that is skipped -> the fault of the first reward that failed on it
    """

    values: Mapping[str, Values]
    logged: Mapping[str, Mapping[str, Any]]
    faults: Mapping[int, Fault] = field(default_factory=dict)


class RewardProcess:
    """One rank's helper processes: `reward_processes` of them, each with its part of the rewards and answers.

    iterations  number of iterations of the whole run
    blocks      name of a Prefect Secret block -> its value
    kept        folder of values that are kept (`cache: true`); None: they are kept in memory
    rank        of the process that this one is beside; no two write to a file in `kept`
    Requests are answered one at a time, in order. What is answered does not depend on the number of processes.
    """

    def __init__(
        self,
        config: RunConfig,
        iterations: int = 1,
        blocks: Mapping[str, str] | None = None,
        kept: Path | None = None,
        rank: int = 0,
    ) -> None:
        self._config = config if isinstance(config, Scores) and config.rewards else None
        parts = 1 if self._config is None else self._config.reward_processes
        keeps = self._config is not None and any(reward.cache for reward in self._config.rewards)
        start = {
            "blocks": dict(blocks or {}),
            "kept": str(kept) if keeps and kept else None,
            "skips": self._config is not None and self._config.on_reward_error == "skip",
        }
        self._parts = [
            _RewardPart((part, parts), iterations, start | {"writer": f"{rank}-{part}"})
            for part in range(parts)
        ]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rewards")
        self._part_threads = ThreadPoolExecutor(parts, thread_name_prefix="rewards")

    @property
    def helpers(self) -> list["_RewardHelper | None"]:
        """The helper of each part; None where it does not run."""
        return [part.helper for part in self._parts]

    def submit(self, answers: Answers, iteration: int = 0) -> "Future[Judged]":
        """Start judging.

        The future's exception is a RewardError when a reward raised, returned something other than n finite numbers,
        took longer than `reward_timeout_s`, used more than `reward_memory_bytes`, or ended its process. With
        `on_reward_error: skip`, an answer on which alone it did so is among the faults instead.
        """
        return self._thread.submit(self._judge, answers, iteration)

    def close(self) -> None:
        """End the helpers and all that they have started, whatever they are doing. A request in progress fails."""
        for part in self._parts:
            part.close()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._part_threads.shutdown(wait=True, cancel_futures=True)
        for part in self._parts:
            part.end()

    def _judge(self, answers: Answers, iteration: int) -> Judged:
        config = self._config
        if config is None:
            return Judged({}, {})
        asked = [self._part_threads.submit(part.judge, config, answers, iteration) for part in self._parts]
        wait(asked)
        replies = [each.result() for each in asked]  # the first part's error, where several have one
        values: dict[str, Values] = {reward.name: [None] * len(answers) for reward in config.rewards}
        logged: dict[str, Mapping[str, Any]] = {}
        for part, reply in enumerate(replies):
            for name, found in reply["values"].items():
                if name in reply["split"]:
                    values[name][part :: len(replies)] = found
                else:
                    values[name] = found
            logged |= {name: told for name, told in reply["logged"].items() if told or name not in logged}
        order = {reward.name: number for number, reward in enumerate(config.rewards)}
        told = [(place, order[name], Fault(name, why)) for r in replies for name, place, why in r["faults"]]
        return Judged(values, logged, {place: fault for place, _, fault in sorted(told, reverse=True)})


class _RewardPart(HelperOwner["_RewardHelper"]):
    """One helper process, which judges its part of the rewards and answers.

    part   its number, and how many there are
    start  what it is told first, beside the rewards
    """

    def __init__(self, part: tuple[int, int], iterations: int, start: Mapping[str, Any]) -> None:
        super().__init__()
        self._part, self._iterations, self._start = part, iterations, start

    def judge(self, config: Scores, answers: Answers, iteration: int) -> dict[str, Any]:
        """The helper's reply. Raises RewardError.

        Where faulty answers are skipped, a process that is lost over one of them is started anew and judges all but
        that one, with as much time again.
        """
        lost: list[tuple[str, int, str]] = []
        while True:
            try:
                reply = self._judged(config, answers, iteration, lost)
            except _LostInReward as error:
                if config.on_reward_error != "skip" or len(lost) == MOST_LOST:
                    raise
                lost.append((*error.where, str(error)))
            else:
                return reply | {"faults": [*reply["faults"], *lost]}

    def _judged(
        self, config: Scores, answers: Answers, iteration: int, lost: Sequence[tuple[str, int, str]]
    ) -> dict[str, Any]:
        until_s = time.monotonic() + config.reward_timeout_s
        request = {
            "answers": asdict(answers),
            "progress": [iteration, self._iterations],
            "part": self._part,
            "left_out": [(reward, place) for reward, place, _ in lost],
            "until_s": until_s,  # time.monotonic(), which is the same in both processes
            "timeout_s": config.reward_timeout_s,
        }
        try:
            try:
                return self._ask(config, request, until_s)
            except _KilledFromOutside:  # no reward did this, so the process is started again
                self.end()
                return self._ask(config, request, until_s)
        except _KilledFromOutside:
            raise RewardError(
                f"the process of the rewards {_names(config)} was killed twice, as the system does when memory "
                "runs out."
            ) from None
        except RewardError:
            self.end()
            raise

    def _ask(self, config: Scores, request: dict[str, Any], until_s: float) -> dict[str, Any]:
        """Raises RewardError, and _Killed when the helper was killed from outside."""
        if self.closed:
            raise RewardError("the rank's reward process is closed.")
        helper = self.helper = self.helper or _RewardHelper(_names(config))
        with _naming(helper, config):
            if not helper.started:
                helper.start({**self._start, "rewards": [_entry(r) for r in config.rewards]}, until_s)
            look = functools.partial(helper.refuse_large, config.reward_memory_bytes)
            helper.asked_s = time.monotonic()
            helper.lines.send(json.dumps(request), until_s, look)
            while (reply := helper.lines.read(until_s, look)) is not None:
                match reply:
                    case {"at": [name, place]}:
                        helper.reward, helper.place, helper.since_s = name, place, time.monotonic()
                    case {"fault": message, "traceback": trace, "place": place, "searching": searching}:
                        raise RewardError(message, trace, helper.read_place() if searching else place)
                    case {"values": _}:
                        helper.reward, helper.place = "", None
                        return reply
        raise self._ended(helper, config)

    def _ended(self, helper: "_RewardHelper", config: Scores) -> Exception:
        """The reason why the helper ended without a reply: a reward ended it, or it was killed from outside."""
        how = helper.how_it_ended()
        if self.closed:
            return RewardError("the rank's reward process is closed.")
        if how is None:
            return _KilledFromOutside()
        where, frames = helper.written_stack()
        who = helper.at or f"one of the rewards {_names(config)}"
        return helper.lost(f"{who} ended its process with {how}{where}.", frames)


def _entry(reward: RewardFunction | RewardService) -> dict[str, Any]:
    """A reward as its helper takes it."""
    service = None
    if isinstance(reward, RewardService):
        service = reward.model_dump(
            include={"answers_per_request", "request_timeout_s", "retries", "allow_private"}
        )
    return {
        "name": reward.name,
        "location": reward.location,
        "kwargs": dict(reward.arguments),
        "service": service,
        "concurrency": reward.concurrency,
        "cache": reward.cache,
        "per": reward.per,
    }


class _KilledFromOutside(Exception):
    """The helper was killed from outside, not by what a reward did."""


class _LostInReward(RewardError):
    """The process was ended in the call for one answer. where: the reward's name, the answer's place"""

    where: tuple[str, int] = ("", 0)


class _RewardHelper(HelperProcess):
    """A running process of the rewards.

    reward   the name of the reward that it is calling; "" for none
    place    the index of the answer where it judges one alone
    asked_s  time.monotonic() of the request, and since_s of the call that it is in
    """

    def __init__(self, names: str) -> None:
        super().__init__("rlhf_tasks.rewards.helper:serve", f"the rewards {names}")
        self.reward, self.place = "", None
        self.asked_s = self.since_s = 0.0

    @property
    def at(self) -> str:
        """The reward that it is calling, for sentences."""
        return self.reward and f"reward {self.reward!r}"

    def lost(self, message: str, frames: str) -> RewardError:
        """The error of a helper that ends, or must be ended, in a call."""
        if self.place is None:
            return RewardError(message, frames)
        error = _LostInReward(message, frames, self.place)
        error.where = (self.reward, self.place)
        return error

    def read_place(self) -> int | None:
        """The index of the answer that the reward fails on; None where the helper does not find it in SEARCH_S."""
        with contextlib.suppress(TimeoutError):
            reply = self.lines.read(time.monotonic() + SEARCH_S)
            while reply is not None and "place" not in reply:
                reply = self.lines.read(time.monotonic() + SEARCH_S)
            return None if reply is None else reply["place"]
        return None


@contextlib.contextmanager
def _naming(helper: _RewardHelper, config: Scores) -> Iterator[None]:
    """Turns a helper that is late or too large into a RewardError that says where in the user's code it is."""
    try:
        yield
    except TimeoutError:
        where, frames = helper.stack()
        who = helper.at or f"the process of the rewards {_names(config)}"
        message = late_message(who, config.reward_timeout_s, where)
        now_s = time.monotonic()
        if now_s - helper.since_s > (now_s - helper.asked_s) / 2:
            raise helper.lost(message, frames) from None
        raise RewardError(message, frames, helper.place) from None  # the batch as a whole is late
    except TooLarge as error:
        where, frames = helper.stack()
        raise helper.lost(
            f"{helper.at or 'a reward'} takes {error.used_bytes / 1e9:.1f} GB of memory{where}; reward_memory_bytes "
            f"allows {config.reward_memory_bytes / 1e9:.1f} GB. Mend the reward or raise reward_memory_bytes.",
            frames,
        ) from None


def _names(config: Scores) -> str:
    return ", ".join(repr(reward.name) for reward in config.rewards)
