"""`on_reward_error: skip`: the answers that a reward fails on are named, and all others have their values."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError
from prefect_rlhf.rlhf_tasks.user_code.forms import Answers
from prefect_rlhf.rlhf_tasks.user_code.process import MOST_LOST
from prefect_rlhf.rlhf_tasks.user_code.rewards import Judged, RewardProcess
from tests.judged import answers

SOURCE = """
import os
import time

def batch(completions, log_extra=None, **columns):
    log_extra and log_extra("length", [len(c) for c in completions])
    return [1 / (c != "bad") + len(c) for c in completions]

async def async_batch(completions, **columns):
    return [1 / (c != "bad") + len(c) for c in completions]

def not_a_number(completions, **columns):
    return [float("nan") if c == "bad" else 2.0 for c in completions]

def one(data_source, solution_str, ground_truth, extra_info=None):
    return 1 / (solution_str != "bad")

async def async_one(data_source, solution_str, ground_truth, extra_info=None):
    return 1 / (solution_str != "bad")

def without_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0} if solution_str != "bad" else {"acc": 1}

def leaves(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "bad":
        os._exit(3)
    return 1.0

def hangs(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "bad":
        time.sleep(600)
    return 1.0

async def async_hangs(data_source, solution_str, ground_truth, extra_info=None):
    import asyncio
    await asyncio.sleep(600 if solution_str == "bad" else 0)
    return 1.0

def slow(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.4)
    return 1.0

async def async_slow(data_source, solution_str, ground_truth, extra_info=None):
    import asyncio
    await asyncio.sleep(0.4)
    return 1.0

def hangs_in_a_batch(completions, **columns):
    assert "bad" not in completions or len(completions) == 1
    if completions == ["bad"]:
        time.sleep(600)
    return [1.0] * len(completions)

def short(completions, **columns):
    return [1.0]

def never_together(completions, **columns):
    assert len(completions) < 2, "one at a time"
    return [1.0]
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started: list[RewardProcess] = []
    (tmp_path / "mine.py").write_text(SOURCE)

    def make(*names: str, cache: bool = False, **settings: Any) -> RewardProcess:
        document = {
            "type": "grpo",
            "models": {"actor": "a"},
            "data": {"train": "d"},
            "sampling": {"max_completion_length": 4},
            "total_iterations": 1,
            "rewards": [{"function": f"{tmp_path / 'mine.py'}:{name}", "cache": cache} for name in names],
            "on_reward_error": "skip",
            **settings,
        }
        started.append(RewardProcess(make_config(document), folder=tmp_path))
        return started[-1]

    yield make
    for process in started:
        process.close()


def of_texts(*texts: str) -> Answers:
    rows = [{"prompt": "?", "data_source": "mine", "ground_truth": "7"} for _ in texts]
    return answers(*rows, completions=list(texts))


FIVE = of_texts("a", "bad", "ccc", "bad", "e")


def judge(process: RewardProcess, judged: Answers = FIVE) -> Judged:
    return process.submit(judged).result(timeout=110)


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        (
            "batch",
            [2.0, None, 4.0, None, 2.0],
            "reward 'batch' raised ZeroDivisionError: division by zero at ",
        ),
        ("async_batch", [2.0, None, 4.0, None, 2.0], "raised ZeroDivisionError"),
        ("not_a_number", [2.0, None, 2.0, None, 2.0], "returned nan: not a finite number."),
        ("one", [1.0, None, 1.0, None, 1.0], "reward 'one' raised ZeroDivisionError: division by zero at "),
        ("async_one", [1.0, None, 1.0, None, 1.0], "raised ZeroDivisionError"),
        ("without_score", [1.0, None, 1.0, None, 1.0], "returned a dict without 'score' (keys: acc)."),
        ("leaves", [1.0, None, 1.0, None, 1.0], "ended its process with exit status 3"),
    ],
)
def test_the_guilty_answers_are_named_and_the_others_judged(start: Any, name: str, values: list, reason: str):
    judged = judge(start(name))
    assert dict(judged.values) == {name: values}
    assert sorted(judged.faults) == [1, 3]
    for fault in judged.faults.values():
        assert fault.reward == name
        assert reason in fault.reason
    if reason.endswith(" at "):
        assert "mine.py:" in judged.faults[1].reason


def test_a_process_serves_on_after_it_has_skipped(start: Any):
    process = start("batch", "one")
    judge(process)
    assert judge(process, of_texts("a", "b")).values == {"batch": [2.0, 2.0], "one": [1.0, 1.0]}


@pytest.mark.parametrize(
    "name",
    ["hangs", *(pytest.param(n, marks=pytest.mark.whole) for n in ("async_hangs", "hangs_in_a_batch"))],
)
def test_an_answer_on_which_a_reward_hangs_is_skipped(start: Any, name: str):
    judged = judge(start(name, reward_timeout_s=4.0), of_texts("a", "bad", "ccc"))
    assert dict(judged.values) == {name: [1.0, None, 1.0]}
    assert "gave no answer in 4 s at " in judged.faults[1].reason


@pytest.mark.parametrize("name", ["slow", pytest.param("async_slow", marks=pytest.mark.whole)])
def test_a_batch_that_is_late_as_a_whole_stops_the_run(start: Any, name: str, tmp_path: Path):
    one_by_one = [{"function": f"{tmp_path / 'mine.py'}:{name}", "concurrency": 1}]
    with pytest.raises(RewardError, match=f"'{name}' gave no answer in 4 s"):
        judge(start(name, reward_timeout_s=4.0, rewards=one_by_one), of_texts(*"abcdefghijklmnop"))


def test_a_reward_that_loses_its_process_again_and_again_stops_the_run(start: Any):
    with pytest.raises(RewardError, match="ended its process with exit status 3"):
        judge(start("leaves"), of_texts(*["bad"] * (MOST_LOST + 1), "a"))


def test_each_answer_is_skipped_once_and_the_first_reward_that_failed_is_named(start: Any):
    judged = judge(start("one", "batch", "not_a_number"))
    assert {place: fault.reward for place, fault in judged.faults.items()} == {1: "one", 3: "one"}


@pytest.mark.parametrize("processes", [1, 3])
def test_several_processes_skip_the_same_answers(start: Any, processes: int):
    judged = judge(start("one", "batch", reward_processes=processes))
    assert judged.values == {"one": [1.0, None, 1.0, None, 1.0], "batch": [2.0, None, 4.0, None, 2.0]}
    assert sorted(judged.faults) == [1, 3]


def test_what_a_reward_logs_is_of_the_answers_that_it_judged(start: Any):
    assert judge(start("batch")).logged == {"batch": {"length": [1, 3, 1]}}


def test_a_kept_value_is_none_of_a_skipped_answer(start: Any, tmp_path: Path):
    first = judge(start("one", cache=True))
    again = judge(start("one", cache=True))
    assert again == first
    assert sum(len(path.read_text().split()) for path in (tmp_path / "reward-values").glob("*.jsonl"))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("short", r"^reward 'short' returned 1 values for 5 answers\.$"),
        (
            "never_together",
            r"raised AssertionError: one at a time at .*mine\.py:\d+\. It does so for 5 answers together, for none",
        ),
    ],
)
def test_a_fault_that_is_no_answers_own_stops_the_run(start: Any, name: str, sentence: str):
    with pytest.raises(RewardError, match=sentence):
        judge(start(name))
