"""Blocks of ours are stored by a Prefect server and loaded again as they were."""

import pytest

from prefect_rlhf.blocks import PPOConfiguration, RlhfCluster, StoredPlan

FIELDS = {
    "models": {"actor": "m"},
    "data": {"train": "d.jsonl"},
    "sampling": {"max_completion_length": 4},
    "rewards": [{"function": "m:f"}],
    "total_iterations": 1,
}
BLOCKS = [
    RlhfCluster(address="tls://scheduler:8786", n_hosts=2, devices_per_host=8),
    PPOConfiguration(config=FIELDS),
    StoredPlan(
        algorithm="ppo",
        n_hosts=1,
        devices_per_host=2,
        assignments={"actor_train": "0-1 d2"},
        iteration_time_s=1.5,
        lower_bound_s=1.0,
        proof_class="all plans",
    ),
]


@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: type(block).__name__)
def test_a_stored_block_is_loaded_as_it_was(prefect, block):
    block.save("stored", overwrite=True)
    assert type(block).load("stored").model_dump() == block.model_dump()
