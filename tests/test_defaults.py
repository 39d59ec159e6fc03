"""What a user may configure has its default in the configuration, and nowhere else."""

from collections.abc import Callable
from inspect import Parameter, signature

import pytest

from prefect_rlhf.flows.cluster.cluster import form_cluster, found_cluster, local_cluster
from prefect_rlhf.planner.plan.workload import Workload
from prefect_rlhf.planner.search.search import find_plan
from prefect_rlhf.rlhf_tasks.config.cluster import Limits
from prefect_rlhf.rlhf_tasks.parallel.train.optimizer import OptimizerSettings
from prefect_rlhf.rlhf_tasks.protocol.ledger import Ledger
from prefect_rlhf.rlhf_tasks.protocol.messages import RunSpec
from prefect_rlhf.rlhf_tasks.protocol.sequencer import Deadlines, Sequencer


@pytest.mark.parametrize(
    ("taker", "names"),
    [
        (RunSpec, ["limits"]),
        (Limits, ["deadline_floor_s", "max_restarts", "snapshot_every", "snapshot_max_s"]),
        (Ledger, ["limits"]),
        (Sequencer, ["deadlines"]),
        (Deadlines, ["factor", "floor_s"]),
        (local_cluster, ["deadline_s"]),
        (found_cluster, ["deadline_s"]),
        (form_cluster, ["deadline_s"]),
        (OptimizerSettings, ["betas", "eps", "weight_decay", "max_grad_norm"]),
        (Workload, ["itemsize", "recompute"]),
        (find_plan, ["time_limit_s"]),
    ],
)
def test_a_setting_has_no_second_default(taker: Callable[..., object], names: list[str]) -> None:
    parameters = signature(taker).parameters
    assert [name for name in names if parameters[name].default is not Parameter.empty] == []
