"""What Prefect is told of a node of a real run: metadata, however many tokens the node works on."""

import asyncio
import json

import pytest

from prefect_rlhf.flows.ppo import rlhf_ppo
from prefect_rlhf.flows.run.summary import read_jsonl
from prefect_rlhf.flows.view import iterations as iteration_view
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan
from tests.tiny_runs import TWO_RANKS, ppo_config

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("whole_view"),
]
ITERATIONS = 2


@pytest.mark.slow
def test_nothing_that_prefect_is_told_of_a_node_grows_with_the_tokens(
    cluster, prefect, tmp_path, monkeypatch
):
    told, events_of = [], iteration_view.events_of

    def measured(subflow):
        events = events_of(subflow)
        told.extend(len(json.dumps(event)) for event in events)
        return events

    monkeypatch.setattr(iteration_view, "events_of", measured)
    largest, tokens = [], []
    place = {"address": cluster.scheduler_address, "devices_per_host": 2}
    for name, length in (("few-tokens", 4), ("lot-tokens", 90)):
        told.clear()
        sampling = {"max_completion_length": length}
        changes = {"plan": TWO_RANKS, "total_iterations": ITERATIONS, "cluster": place, "sampling": sampling}
        asyncio.run(rlhf_ppo(ppo_config(tmp_path, name=name, **changes)))
        folder = tmp_path / "runs" / name
        plan = ExecutionPlan.model_validate_json((folder / "plan.json").read_text())
        assert len(told) >= ITERATIONS * len(plan.nodes)
        largest.append(max(told))
        lengths = [row["completions/mean_length"] for row in read_jsonl(folder / "metrics.jsonl")]
        tokens.append(plan.n_seqs * max(lengths))
    assert tokens[1] - tokens[0] > 500
    assert abs(largest[1] - largest[0]) < 100
