"""Async rewards that judge an answer alone are asked for it before the batch is there; what they give is the same."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError
from prefect_rlhf.rlhf_tasks.user_code.rewards import RewardProcess
from tests.judged import answers
from tests.loopback import Service, served

pytestmark = pytest.mark.cluster

N = 4
BATCH = answers(
    *({"prompt": f"p{place}", "ground_truth": str(place)} for place in range(N)),
    completions=["a", "b", "c", "b"],
)
SOURCE = """
import asyncio
import os
import time
from pathlib import Path

FOLDER = Path(__file__).parent

def said(what):
    with open(FOLDER / "said", "a") as file:
        file.write(what + "\\n")

def value(solution_str, ground_truth):
    said(f"{ground_truth} {solution_str}")
    return len(solution_str) + int(ground_truth)

async def async_score(data_source, solution_str, ground_truth, extra_info=None):
    return value(solution_str, ground_truth)

def score(data_source, solution_str, ground_truth, extra_info=None):
    return value(solution_str, ground_truth)

async def async_batch(completions, ground_truth, **columns):
    return [value(*pair) for pair in zip(completions, ground_truth)]

class Alone:
    answers_per_call = 1

    async def __call__(self, completions, ground_truth, log_extra, log_metric, **columns):
        await asyncio.sleep(0.05 * (5 - int(ground_truth[0])))  # the last ones end first
        log_extra("truth", ground_truth)
        log_metric("cost", 0.1 * int(ground_truth[0]))
        return [value(completions[0], ground_truth[0])]

async def at_once(data_source, solution_str, ground_truth, extra_info=None):
    said(f"+ {ground_truth}")
    await asyncio.sleep(0.1)
    said(f"- {ground_truth}")
    return 1.0

async def waits(data_source, solution_str, ground_truth, extra_info=None):
    said(f"waits {ground_truth}")
    try:
        await asyncio.sleep(600 if ground_truth != "3" else 0)
    finally:
        said(f"left {ground_truth}")
    return 1.0

async def fails(data_source, solution_str, ground_truth, extra_info=None):
    said(f"fails {ground_truth}")
    return 1 / (ground_truth != "1")

async def leaves_once(data_source, solution_str, ground_truth, extra_info=None):
    said(f"leaves {ground_truth}")
    if not (FOLDER / "left").exists():
        (FOLDER / "left").touch()
        os._exit(3)
    return 1.0
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RewardProcess]]:
    (tmp_path / "mine.py").write_text(SOURCE)
    started: list[RewardProcess] = []

    def make(*names: str, url: str = "", of_reward: Any = None, **settings: Any) -> RewardProcess:
        rewards = (
            [{"url": url}] if url else [{"function": f"{tmp_path / 'mine.py'}:{name}"} for name in names]
        )
        document = {
            "type": "ppo",
            "models": {"actor": "a"},
            "data": {"train": "d"},
            "sampling": {"max_completion_length": 4},
            "total_iterations": 1,
            "rewards": [reward | (of_reward or {}) for reward in rewards],
            "reward_timeout_s": 60.0,
            **settings,
        }
        started.append(RewardProcess(make_config(document), folder=tmp_path))
        return started[-1]

    yield make
    for process in started:
        process.close()


@pytest.fixture
def said(tmp_path: Path) -> Callable[[], list[str]]:
    """What rewards have said, in order."""
    return lambda: (tmp_path / "said").read_text().splitlines() if (tmp_path / "said").exists() else []


def until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end_s, "it does not come"
        time.sleep(0.01)


def ask_early(process: RewardProcess, *numbers: int, iteration: int = 0) -> None:
    for number in numbers:
        process.ask_early(BATCH.select([number]), [number], iteration)


def judged(process: RewardProcess, iteration: int = 0) -> Any:
    return process.submit(BATCH, iteration).result(timeout=70)


VALUES = [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("name", "is_early"),
    [("async_score", True), ("Alone", True), ("score", False), ("async_batch", False)],
)
def test_an_async_reward_that_judges_answers_alone_is_asked_before_the_batch(
    start: Any, said: Any, name: str, is_early: bool
):
    process = start(name)
    ask_early(process, 1, 3)
    if is_early:
        until(lambda: len(said()) == 2)
        assert sorted(said()) == ["1 b", "3 b"]
    found = judged(process)
    assert found.early == (2 if is_early else None)
    assert found.values == {name: VALUES}
    assert len(said()) == N, "each answer once"


@pytest.fixture
def service() -> Iterator[Service]:
    """It judges by the column `ground_truth`."""

    def says(body: dict[str, Any]) -> Any:
        pairs = zip(body["completions"], body["columns"]["ground_truth"], strict=True)
        return {"rewards": [len(text) + int(truth) for text, truth in pairs]}

    with served(Service(says)) as service:
        yield service


@pytest.mark.parametrize("per_request", [1, 2])
def test_a_service_that_gets_an_answer_a_request_is_asked_before_the_batch(
    start: Any, service: Service, per_request: int
):
    """Several answers of a request are those of the batch: they do not depend on who ended first."""
    url = f"{service.url}/score"
    process = start(url=url, of_reward={"answers_per_request": per_request, "allow_private": True})
    ask_early(process, 2)
    if per_request == 1:
        service.wait_for(1)
        assert [request["completions"] for request in service.asked] == [["c"]]
    found = judged(process)
    assert found.values == {"score": VALUES}
    assert sorted(request["completions"] for request in service.asked) == (
        [["a"], ["b"], ["b"], ["c"]] if per_request == 1 else [["a", "b"], ["c", "b"]]
    )


@pytest.mark.parametrize("processes", [1, 3])
def test_values_and_what_is_logged_are_those_without(start: Any, said: Any, processes: int):
    names = ("async_score", "Alone", "score")
    plain, early = (start(*names, reward_processes=processes) for _ in range(2))
    expected = judged(plain)
    ask_early(early, 3, 0, 2)
    until(lambda: len(said()) >= 3 * N + 2)
    found = judged(early)
    assert (found.values, found.logged) == (expected.values, expected.logged)
    assert found.logged["Alone"] == {"truth": ["0", "1", "2", "3"], "cost": pytest.approx(0.6)}
    assert (expected.early, found.early) == (0, 3)
    assert len(said()) == 2 * 3 * N


def test_what_was_asked_about_another_answer_is_not_taken(start: Any, said: Any):
    process = start("async_score")
    other_row = replace(BATCH, columns={**BATCH.columns, "ground_truth": ["9"] * N})
    process.ask_early(other_row.select([0]), [0])
    process.ask_early(replace(BATCH, completion_ids=[[2]] * N).select([1]), [1])
    process.ask_early(BATCH.select([2]), [2], iteration=1)
    until(lambda: len(said()) == 3)
    found = judged(process)
    assert (found.values, found.early) == ({"async_score": VALUES}, 0)


def test_at_most_concurrency_calls_run_at_a_time_early_ones_among_them(start: Any, said: Any):
    process = start("at_once", of_reward={"concurrency": 2})
    ask_early(process, 0, 1, 2)
    until(lambda: "+ 1" in said())
    judged(process)
    running = most = 0
    for line in said():
        running += 1 if line.startswith("+") else -1
        most = max(most, running)
    assert (most, len(said())) == (2, 2 * N)


def test_an_early_fault_is_that_of_the_batch(start: Any, said: Any):
    for choice in ("stop", "skip"):
        process = start("fails", on_reward_error=choice)
        before = len(said())
        ask_early(process, 0, 1)
        until(lambda before=before: len(said()) == before + 2)
        if choice == "stop":
            with pytest.raises(
                RewardError, match=r"reward 'fails' raised ZeroDivisionError.* at .*mine.py:"
            ) as caught:
                judged(process)
            assert caught.value.place == 1
            continue
        found = judged(process)
        assert found.values == {"fails": [1.0, None, 1.0, 1.0]}
        assert [*found.faults] == [1]
        assert "raised ZeroDivisionError" in found.faults[1].reason


def test_an_early_call_that_never_ends_is_late_with_its_batch(start: Any, said: Any):
    process = start("waits", on_reward_error="skip", reward_timeout_s=4.0)
    ask_early(process, 1, 3)
    until(lambda: len(said()) == 3)
    found = judged(process)
    assert found.values == {"waits": [None, None, None, 1.0]}
    assert found.faults[1].reason.startswith("reward 'waits' gave no answer in 4 s at ")


def test_a_process_that_is_lost_over_an_early_call_is_asked_for_the_whole_batch(start: Any, said: Any):
    process = start("leaves_once")
    ask_early(process, 2)
    until(lambda: said() == ["leaves 2"])
    found = judged(process)
    assert (found.values, found.early) == ({"leaves_once": [1.0] * N}, 0)
    assert len(said()) == 1 + N


def test_calls_of_an_iteration_that_nobody_asks_for_are_cancelled_by_the_next_ones(start: Any, said: Any):
    process = start("waits", on_reward_error="skip", reward_timeout_s=3.0)
    ask_early(process, 0)
    ask_early(process, 2, iteration=2)  # it is drawn ahead
    until(lambda: len(said()) == 2)
    process.submit(BATCH.select([3]), 1).result(timeout=70)
    assert set(said()) == {"waits 0", "waits 2", "left 0", "waits 3", "left 3"}
    assert process.submit(BATCH.select([2]), 2).result(timeout=70).early == 1


def test_a_killed_run_asks_again_only_for_what_has_no_value_yet(start: Any, said: Any, tmp_path: Path):
    """With `cache: true` a value is kept when it comes, not when its batch is judged."""
    process = start("async_score", of_reward={"cache": True})
    ask_early(process, 1, 2)
    until(lambda: len([*(tmp_path / "reward-values").glob("*.jsonl")]) == 1)
    until(lambda: len(next((tmp_path / "reward-values").glob("*.jsonl")).read_text().split()) == 4)
    process.close()
    again = start("async_score", of_reward={"cache": True})
    ask_early(again, 0, 1)
    found = judged(again)
    assert found.values == {"async_score": VALUES}
    assert said().count("1 b") == said().count("2 c") == 1
    assert len(said()) == N


def test_a_run_that_ends_meanwhile_leaves_no_process(start: Any, said: Any):
    process = start("waits")
    ask_early(process, 0)
    until(lambda: said() == ["waits 0"])
    (parent,) = [
        each for each in psutil.Process().children() if "user_code.judge" in " ".join(each.cmdline())
    ]
    below = parent.children(recursive=True)
    assert below
    process.close()
    assert not any(each.is_running() for each in [parent, *below])
