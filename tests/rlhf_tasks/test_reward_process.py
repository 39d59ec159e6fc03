"""The helper process of Python rewards: conventions, weights, and every way in which a reward can fail."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_tasks.config import make_config
from rlhf_tasks.reward_process import RewardProcess
from rlhf_tasks.rewards import Answers, RewardError

REWARDS = """
import asyncio, os, sys, time

def length(prompts, completions, **columns):
    print("a reward may print")
    return [len(c) for c in completions]

async def slow_length(prompts, completions):
    await asyncio.sleep(0.01)
    return [float(len(c)) for c in completions]

def graded(prompts, completions, completion_ids=None, answer=None, bonus=0):
    return [None if a is None else float(c == a) + bonus + 0 * len(i)
            for c, a, i in zip(completions, answer, completion_ids)]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "source": data_source}

def reward_func(queries, prompts, labels):
    return {"rewards": [float(q == p + l) for q, p, l in zip(queries, prompts, labels)]}

def roles(prompts, completions): return [float(c[0]["role"] == "assistant") for c in completions]
def raises(prompts, completions): raise KeyError("ground_truth")
def nan(prompts, completions): return [float("nan")] * len(completions)
def short(prompts, completions): return [1.0]
def text(prompts, completions): return ["good"] * len(completions)
def number(prompts, completions): return 1.0
def hangs(prompts, completions):
    open(__file__ + ".hangs", "w").close()
    time.sleep(600)
def exits(prompts, completions): os._exit(3)
def odd(first, second): return []
constant = 7
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(REWARDS)
    return path


@pytest.fixture
def start(module: Path) -> Iterator[Any]:
    started = []

    def make(*names: str, timeout_s: float = 100.0, **kwargs: Any) -> RewardProcess:
        document = {
            "type": "ppo",
            "models": {"actor": "a"},
            "data": {"train": "d"},
            "sampling": {"max_completion_length": 4},
            "total_iterations": 1,
            "rewards": [{"function": f"{module}:{name}", "kwargs": kwargs} for name in names],
            "reward_timeout_s": timeout_s,
        }
        started.append(RewardProcess(make_config(document)))
        return started[-1]

    yield make
    for process in started:
        process.close()


def hanging(module: Path) -> Path:
    """The file that the reward `hangs` makes before it hangs."""
    return Path(f"{module}.hangs")


ANSWERS = Answers.of_columns(
    ['{"prompt": "p", "answer": "aa"}', '{"prompt": "q", "answer": null}'], ["aa", "b"], [[1, 2], [3]]
)


def judge(process: RewardProcess, answers: Answers = ANSWERS) -> dict[str, list]:
    return process.submit(answers).result(timeout=110)


def test_several_rewards_sync_and_async_with_columns_and_kwargs(start: Any):
    process = start("length", "slow_length", "graded", bonus=2)
    expected = {"length": [2.0, 1.0], "slow_length": [2.0, 1.0], "graded": [3.0, None]}
    assert judge(process) == expected
    assert judge(process) == expected  # the same process answers again


def test_rewards_of_verl_and_openrlhf_are_called_their_way(start: Any):
    rows = ['{"prompt": "p", "data_source": "s", "reward_model": {"ground_truth": "aa"}, "label": "aa"}'] * 2
    answers = Answers.of_columns(rows, ["aa", "b"], [[1], [2]])
    assert judge(start("compute_score", "reward_func"), answers) == {
        "compute_score": [1.0, 0.0],
        "reward_func": [1.0, 0.0],
    }


def test_answers_to_conversations_are_messages(start: Any):
    answers = Answers.of_columns(['{"prompt": [{"role": "user", "content": "hi"}]}'], ["ho"], [[1]])
    assert judge(start("roles"), answers) == {"roles": [1.0]}


def test_columns_that_some_rows_lack_are_none():
    answers = Answers.of_columns(
        ['{"prompt": "p", "a": 1}', '{"prompt": "q", "b": 2}'], ["x", "y"], [[1], [2]]
    )
    assert answers.columns == {"a": [1, None], "b": [None, 2]}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("raises", "reward 'raises' raised KeyError: 'ground_truth'."),
        ("nan", "reward 'nan' returned nan for answer 0: not a finite number."),
        ("short", "reward 'short' returned 1 values for 2 answers."),
        ("text", "reward 'text' returned 'good' for answer 0: not a number."),
        ("number", "reward 'number' returned float instead of a list of numbers."),
        ("exits", "the process of the rewards 'exits' ended with exit status 3."),
        ("missing", "has no function 'missing'."),
        ("constant", "'constant' is not a function."),
        ("odd", "takes (first, second). Give it the parameters (prompts, completions, **columns)."),
    ],
)
def test_every_fault_is_named(start: Any, name: str, sentence: str):
    with pytest.raises(RewardError) as caught:
        judge(start(name))
    assert sentence in str(caught.value)


def test_a_hanging_reward_ends_at_its_deadline_and_leaves_no_process(start: Any):
    process = start("hangs", timeout_s=1.5)
    with pytest.raises(RewardError, match=r"'hangs' gave no answer in 1\.5 s"):
        judge(process)
    assert process._process is None


def test_a_module_that_cannot_be_imported_is_named(start: Any, module: Path):
    module.write_text("import nothing_of_that_name")
    with pytest.raises(RewardError, match=r"importing .* raised ModuleNotFoundError"):
        judge(start("length"))


def test_closing_ends_a_reward_under_way(start: Any, module: Path):
    process = start("hangs")
    pending = process.submit(ANSWERS)
    while not hanging(module).exists():
        time.sleep(0.01)
    helper = process._process
    process.close()
    assert helper is not None
    assert helper.poll() is not None
    with pytest.raises(RewardError):
        pending.result(timeout=5)


def test_the_helper_dies_with_its_rank(module: Path):
    code = f"""
import os, time
from rlhf_tasks.config import make_config
from rlhf_tasks.reward_process import RewardProcess
from rlhf_tasks.rewards import Answers
config = make_config(dict(type="ppo", models=dict(actor="a"), data=dict(train="d"), total_iterations=1,
    sampling=dict(max_completion_length=4), rewards=[dict(function={f"{module}:hangs"!r})]))
process = RewardProcess(config)
process.submit(Answers(["p"], ["c"], [[1]], {{}}))
while not os.path.exists({str(hanging(module))!r}): time.sleep(0.01)
print(process._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    rank = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2], text=True
    )
    helper = int(rank.communicate(timeout=100)[0])
    deadline = time.monotonic() + 60
    while _alive(helper) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(helper)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
