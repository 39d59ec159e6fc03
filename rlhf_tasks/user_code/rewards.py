"""The processes beside a rank that run the user's Python rewards, and the samples that they judge in a run folder."""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from prefect_rlhf.rlhf_tasks.config.functions import is_pickled
from prefect_rlhf.rlhf_tasks.config.responses import RewardConfig
from prefect_rlhf.rlhf_tasks.config.sampling import Scores
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError
from prefect_rlhf.rlhf_tasks.user_code.forms import Answers, Values
from prefect_rlhf.rlhf_tasks.user_code.judge import TIMEOUT_KEY
from prefect_rlhf.rlhf_tasks.user_code.process import ENDING_S, MOST_LOST, Killed, Lost, Terms, UserProcess

KEPT_VALUES = "reward-values"  # folder in a run folder, of values that rewards with `cache: true` have given
SAMPLES = "samples"
"""Folder in a run folder: one JSONL file per iteration, dp rank and part of the reward call."""
SKIPPED_SAMPLES = "skipped-samples"
"""Folder in a run folder, of the samples that a reward failed on (`on_reward_error: skip`)."""


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
    early   how many answers some reward was asked for before; None where no reward is asked for single answers
    """

    values: Mapping[str, Values]
    logged: Mapping[str, Mapping[str, Any]]
    faults: Mapping[int, Fault] = field(default_factory=dict)
    early: int | None = None


class RewardProcess:
    """One rank's processes of rewards: `reward_processes` of them, each with its part of the rewards and answers.

    iterations  number of iterations of the whole run
    blocks      name of a Prefect Secret block -> its value
    folder      the run's: it has the functions that a notebook or a script defined, and keeps values
                (`cache: true`); None: there are none of these, and values are kept in memory
    writer      begins the names of its files of values; no two have the same
    Requests are answered one at a time, in order. What is answered does not depend on the number of processes.
    """

    def __init__(
        self,
        config: RunConfig,
        iterations: int = 1,
        blocks: Mapping[str, str] | None = None,
        folder: Path | None = None,
        writer: str = "0",
    ) -> None:
        self._config = config if isinstance(config, Scores) and config.scoring_rewards else None
        self._iterations = iterations
        self.processes: list[UserProcess] = []
        if self._config is not None:
            keeps = any(reward.cache for reward in self._config.scoring_rewards)
            kept = str(folder / KEPT_VALUES) if keeps and folder else None
            begin = {"blocks": dict(blocks or {}), "kept": kept}
            for part in range(self._config.reward_processes):
                terms = _terms(self._config, begin | {"writer": f"{writer}-{part}"}, folder)
                self.processes.append(UserProcess(terms))
        self._may_be_early = self._config is not None  # until a process says more
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rewards")
        self._part_threads = ThreadPoolExecutor(max(len(self.processes), 1), thread_name_prefix="rewards")

    def ask_early(self, answers: Answers, numbers: Sequence[int], iteration: int = 0) -> None:
        """Ask async rewards that judge answers alone for some answers of a batch that is to come: `submit` then waits
        for what is left. Nothing is said of them before, no fault either.

        numbers  of the answers in that batch
        """
        if self._may_be_early:
            early = {
                "early": list(numbers),
                "answers": asdict(answers),
                "progress": [iteration, self._iterations],
            }
            self._thread.submit(self._tell, early)

    def _tell(self, request: dict[str, Any]) -> None:
        for part, process in enumerate(self.processes):
            process.tell(request | {"part": (part, len(self.processes))})

    def submit(self, answers: Answers, iteration: int = 0) -> "Future[Judged]":
        """Start judging.

        The future's exception is a RewardError when a reward raised, returned something other than n finite numbers,
        took longer than `reward_timeout_s`, used more than `reward_memory_bytes`, or ended its process. With
        `on_reward_error: skip`, an answer on which alone it did so is among the faults instead.
        """
        return self._thread.submit(self._judge, answers, iteration)

    def close(self) -> None:
        """End the processes and all that they have started, whatever they are doing. A request in progress fails."""
        for process in self.processes:
            process.close()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._part_threads.shutdown(wait=True, cancel_futures=True)
        for process in self.processes:
            process.end()

    def _judge(self, answers: Answers, iteration: int) -> Judged:
        config = self._config
        if config is None:
            return Judged({}, {})
        request = {"answers": asdict(answers), "progress": [iteration, self._iterations]}
        of_parts = [
            self._part_threads.submit(
                _reply,
                process,
                request | {"part": (part, len(self.processes))},
                config.on_reward_error == "skip",
            )
            for part, process in enumerate(self.processes)
        ]
        wait(of_parts)
        replies = [each.result() for each in of_parts]  # the first part's error, where several have one
        values: dict[str, Values] = {reward.name: [None] * len(answers) for reward in config.scoring_rewards}
        logged: dict[str, Mapping[str, Any]] = {}
        for reply in replies:
            logged |= reply["logged"]
            for name, pairs in reply["values"].items():
                for place, value in pairs:
                    values[name][place] = value
        self._may_be_early = any(reply["may_be_early"] for reply in replies)
        early = len({place for reply in replies for place in reply["early"]}) if self._may_be_early else None
        order = list(values)
        faults = [
            (place, order.index(name), Fault(name, why)) for r in replies for name, place, why in r["faults"]
        ]
        return Judged(values, logged, {place: why for place, _, why in sorted(faults, reverse=True)}, early)


def _reply(process: UserProcess, request: Mapping[str, Any], skips: bool) -> dict[str, Any]:
    """A process's answer to its part of a batch. Raises RewardError.

    Where faulty answers are skipped, a process that is lost over one of them is started anew and judges all but that
    one, with as much time again. One that was killed from outside is started anew once.
    """
    lost: list[tuple[str, int, str]] = []
    was_killed = False
    while True:
        left_out = [(reward, place) for reward, place, _ in lost]
        try:
            reply = process.ask({**request, "left_out": left_out})
        except RewardError as error:
            process.end()
            match error:
                case Killed() if not was_killed:
                    was_killed = True
                case Lost(called=reward, place=int(place)) if skips and len(lost) < MOST_LOST:
                    lost.append((reward, place, str(error)))
                    was_killed = False
                case _:
                    raise
        else:
            return reply | {"faults": [*reply["faults"], *lost]}


def _terms(config: Scores, begin: Mapping[str, Any], folder: Path | None) -> Terms:
    return Terms(
        kind="prefect_rlhf.rlhf_tasks.user_code.judge:Judge",
        what=f"the rewards {', '.join(repr(reward.name) for reward in config.scoring_rewards)}",
        who="reward {!r}".format,
        begin={
            **begin,
            "rewards": [_stated(reward, config, folder) for reward in config.scoring_rewards],
            "skips": config.on_reward_error == "skip",
            "alone": config.scoring_role != "reward" and config.played is None,
        },
        timeout_s=config.reward_timeout_s,
        timeout_key=TIMEOUT_KEY,
        most_bytes=config.reward_memory_bytes,
    )


def _stated(reward: RewardConfig, config: Scores, folder: Path | None) -> dict[str, Any]:
    """A reward as its process takes it. folder: the run's"""
    location = reward.location
    if folder is not None and is_pickled(location):
        location = str(folder / location)
    service = None
    if reward.url is not None:
        service = reward.model_dump(include={"answers_per_request", "allow_private", "body"})
        service["request_timeout_s"] = config.reward_timeout_s / 2
    of_both = {"name": reward.name, "location": location, "kwargs": dict(reward.arguments)}
    return of_both | {"service": service} | reward.model_dump(include={"concurrency", "cache", "per", "only"})


def mean_scores(run_folder: Path, n_samples: int) -> dict[str, float]:
    """Means over the samples of a finished rollout: `reward`, of the scores, and `rewards/<name>/mean` of each,
    without samples that it does not judge. `samples` is their number.

    n_samples  as in `read_samples`
    """
    values: dict[str, list[float]] = {"reward": []}
    count = 0
    for sample in read_samples(run_folder, n_samples):
        count += 1
        means = {f"rewards/{name}/mean": value for name, value in sample["rewards"].items()}
        means |= {"reward": sample["score"], "rewards/reward_model/mean": sample["reward_model"]}
        for name, value in means.items():
            if value is not None:
                values.setdefault(name, []).append(value)
    return {"samples": count, **{name: fmean(numbers) for name, numbers in values.items() if numbers}}


def read_samples(run_folder: Path, n_samples: int) -> Iterator[dict[str, Any]]:
    """The samples of a finished rollout in the order of their ids.

    n_samples  rows times num_generations. The last iteration may restart the data; those samples are left out.
    """
    samples = [
        json.loads(line)
        for path in sorted((run_folder / SAMPLES).glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").split("\n")  # texts may contain other line separators
        if line
    ]
    return (sample for sample in sorted(samples, key=lambda s: s["id"]) if sample["id"] < n_samples)
