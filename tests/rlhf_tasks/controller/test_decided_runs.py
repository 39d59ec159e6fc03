"""A run that decides from which rows it draws and when it is evaluated, on real ranks: also where a rank is killed,
and where another attempt continues it. Lineage counts the rows that its rewards have seen."""

import asyncio
import json
from collections import Counter

import pytest

from prefect_rlhf.flows.run.origins import lessons_of
from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.flows.run.run_identity import keep_identity
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.protocol.messages import Aborted, Committed
from tests.committed import assert_same_run, metrics_of
from tests.rlhf_tasks.attempts import attend, committed, of_type, run_undisturbed, spec_of_job
from tests.rlhf_tasks.faulty_rank import Fault
from tests.tiny_curriculum import NAME, SHARES
from tests.tiny_runs import ppo_config

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

ITERATIONS = 4
NOTED = "noted.jsonl"
REWARD = """
import json

def noting(prompts, completions, **columns):
    with open({path!r}, "a") as file:
        file.writelines(json.dumps(prompt) + "\\n" for prompt in prompts)
    return [float(len(answer) % 3) for answer in completions]
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    rows = [{"prompt": f"{letter}{letter}"} for letter in "abcdefghijklmnop"]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "held-out.jsonl").write_text('{"prompt": "zz"}\n')
    (folder / "reward.py").write_text(REWARD.format(path=str(folder / NOTED)))
    document = ppo_config(folder).model_dump(mode="json", exclude_unset=True) | {
        "type": NAME,
        "data": {"train": str(folder / "train.jsonl")},
        "models": {"actor": str(folder / "actor")},
        "rewards": [{"function": f"{folder / 'reward.py'}:noting"}],
        "evaluation": {"data": str(folder / "held-out.jsonl"), "every": ITERATIONS},
        "batch_size": 8,
        "total_iterations": ITERATIONS,
        "cluster": {"devices_per_host": 1},
        "plan": "heuristic",
    }
    for name in ("normalize_values", "num_ppo_epochs"):
        document.pop(name)
    return prepare(make_config(document)), folder


def spec_of(cluster, job, folder, **options):
    folder.mkdir(exist_ok=True)
    job[0].keep_rows(folder)  # those that are held out, too
    executor = {"executor": "tests.rlhf_tasks.faulty_rank:make_executor"}
    return spec_of_job(cluster, job[0], folder, ITERATIONS, **{**executor, **options})


@pytest.fixture(scope="module")
def undisturbed(cluster, job, tmp_path_factory):
    """The folder of a run that nothing disturbed, and how often its rewards saw each prompt."""
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    folder.mkdir()
    keep_identity(folder, job[0])
    run_undisturbed(cluster, spec_of(cluster, job, folder))
    return folder, Counter(map(json.loads, (job[1] / NOTED).read_text().splitlines()))


def test_each_iteration_draws_from_the_decided_rows_and_is_evaluated_where_that_is_decided(undisturbed):
    folder, seen = undisturbed
    metrics = metrics_of(folder)
    assert [row["decided/rows"] for row in metrics] == [0.5, 1.0, 1.0, 1.0]
    assert [row["decided/evaluate"] for row in metrics] == [0.0, 1.0, 0.0, 1.0]
    assert ["eval/reward" in row for row in metrics] == [False, True, False, True]
    assert SHARES == (0.25, 0.5, 1.0)
    assert seen["zz"] == 2
    assert set(list(seen)[:4]) <= {"aa", "bb", "cc", "dd"}, "a quarter of sixteen rows in the first iteration"


def test_lineage_counts_the_rows_that_the_rewards_have_seen(undisturbed):
    folder, seen = undisturbed
    (lesson,) = lessons_of(folder)
    counted = {
        f"{letter}{letter}": n for letter, n in zip("abcdefghijklmnop", lesson.times, strict=True) if n
    }
    assert counted == {prompt: n for prompt, n in seen.items() if prompt != "zz"}


def test_a_killed_rank_changes_no_decision(cluster, job, undisturbed, tmp_path):
    folder = tmp_path / "run"
    Fault(0, 2, "critic_train").write(folder)
    events = asyncio.run(attend(cluster, spec_of(cluster, job, folder)))
    assert of_type(events, Aborted)
    assert committed(events) == list(range(ITERATIONS))
    assert_same_run(folder, undisturbed[0])


def test_another_attempt_decides_as_the_one_before(cluster, job, undisturbed, tmp_path):
    folder = tmp_path / "run"
    asyncio.run(attend(cluster, spec_of(cluster, job, folder), until=Committed))
    asyncio.run(attend(cluster, spec_of(cluster, job, folder, attempt=2)))
    assert_same_run(folder, undisturbed[0])
