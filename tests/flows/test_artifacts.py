"""What a run tells the server beside its graph; pictures are tested with the runs that draw them."""

import asyncio

import pytest
from prefect import flow, tags
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

from flows.artifacts import tag_flow_run
from flows.run_view import run_tags
from rlhf_tasks.config import make_config
from tests.tiny_runs import ppo_config


@pytest.mark.cluster
def test_tags_join_those_that_the_flow_run_has(prefect):
    @flow
    async def tagged() -> list[str]:
        await tag_flow_run(["algo:ppo", "own"])
        await tag_flow_run(["algo:ppo", "plan:auto"])
        async with get_client() as client:
            return sorted((await client.read_flow_run(flow_run.id)).tags)

    with tags("own"):
        assert asyncio.run(tagged()) == ["algo:ppo", "own", "plan:auto"]


def test_tags_name_algorithm_model_and_plan(tmp_path):
    assert run_tags(ppo_config(tmp_path)) == ["algo:ppo", "model:actor", "plan:heuristic"]
    by_hand = ppo_config(tmp_path, plan={"actor_train": {"devices": [0]}})
    assert run_tags(by_hand)[2] == "plan:manual"
    assert run_tags(ppo_config(tmp_path, plan="auto"))[2] == "plan:auto"
    after = {"type": "reward_model", "models": {"actor": "runs/sft-1/model"}, "data": {"train": "d"}}
    assert run_tags(make_config({**after, "total_iterations": 1})) == [
        "algo:reward-model",
        "model:sft-1",
        "plan:heuristic",
    ]
