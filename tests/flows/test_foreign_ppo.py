"""PPO with the product's executor on a cluster that others have started by Dask's own commands."""

import asyncio
from pathlib import Path

import pytest
from distributed import Client

from prefect_rlhf.flows.ppo import rlhf_ppo
from tests.committed import assert_same_run
from tests.flows.dask_commands import LOOPBACK, RANK, dask_worker
from tests.tiny_runs import TWO_RANKS, ppo_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.timeout(900),
]


def test_a_cluster_of_dask_commands_trains_to_the_bits_of_one_of_ours(cluster, commanded, tmp_path):
    def run(address, name):
        place = {"address": address, "devices_per_host": 2}
        config = ppo_config(tmp_path, plan=TWO_RANKS, total_iterations=2, cluster=place, name=name)
        return asyncio.run(rlhf_ppo(config))

    ours = run(cluster.scheduler_address, "ours")
    with dask_worker(commanded, tmp_path, *LOOPBACK, *RANK):
        foreign = run(commanded, "foreign")
        with Client(commanded, set_as_default=False) as client:
            left = client.scheduler_info()["workers"].values()
            offered = sorted(name for worker in left for name in worker["resources"])
            assert offered == ["controller", "slot", "slot"]
    assert foreign["iterations"] == 2
    assert foreign["bytes_reallocated"] == ours["bytes_reallocated"] > 0
    assert_same_run(tmp_path / "runs" / "foreign", tmp_path / "runs" / "ours")
    models = [Path(summary["model"]) / "model.safetensors" for summary in (foreign, ours)]
    assert models[0].read_bytes() == models[1].read_bytes()
