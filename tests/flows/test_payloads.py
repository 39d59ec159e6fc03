"""What Prefect and Dask carry for a node of a real run: metadata, however many tokens the node works on."""

import asyncio

import cloudpickle
import pytest

from flows.ppo import rlhf_ppo
from flows.summary import read_jsonl
from flows.task_runner import PlainSubmit
from rlhf_tasks.spec import ExecutionPlan
from tests.tiny_runs import TWO_RANKS, ppo_config

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("whole_view"),
]
ITERATIONS = 2


def weighed(function, scale):
    """The function, which also appends the size of what it returns to a file; it runs on the controller."""

    def weigh(*args, **kwargs):
        returned = function(*args, **kwargs)
        with scale.open("a") as file:
            file.write(f"{len(cloudpickle.dumps(returned))}\n")
        return returned

    return weigh


def test_no_task_payload_grows_with_the_tokens(cluster, prefect, tmp_path, monkeypatch):
    asked, submit = [], PlainSubmit.submit

    def measured(self, function, *args, wait_for=None, **kwargs):
        asked.append(len(cloudpickle.dumps((function, args, kwargs))))
        return submit(self, weighed(function, scale), *args, wait_for=wait_for, **kwargs)

    monkeypatch.setattr(PlainSubmit, "submit", measured)
    largest, tokens = [], []
    place = {"address": cluster.scheduler_address, "devices_per_host": 2}
    for name, length in (("few-tokens", 4), ("lot-tokens", 90)):
        asked.clear()
        scale = tmp_path / f"{name}.txt"
        sampling = {"max_completion_length": length}
        changes = {"plan": TWO_RANKS, "total_iterations": ITERATIONS, "cluster": place, "sampling": sampling}
        asyncio.run(rlhf_ppo(ppo_config(tmp_path, name=name, **changes)))
        folder = tmp_path / "runs" / name
        plan = ExecutionPlan.model_validate_json((folder / "plan.json").read_text())
        returned = [int(line) for line in scale.read_text().splitlines()]
        assert len(asked) == len(returned) == ITERATIONS * len(plan.nodes)
        largest.append((max(asked), max(returned)))
        lengths = [row["completions/mean_length"] for row in read_jsonl(folder / "metrics.jsonl")]
        tokens.append(plan.n_seqs * max(lengths))
    assert tokens[1] - tokens[0] > 500
    assert min(largest[0]) > 500, "nothing was measured"
    for few, many in zip(*largest, strict=True):
        assert abs(many - few) < 100
