"""What a rank tells the control plane: metadata, whose size knows nothing of tokens."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.rlhf_tasks.protocol.messages import Done, SavedPart
from prefect_rlhf.rlhf_tasks.protocol.sequencer import Sequencer
from prefect_rlhf.rlhf_tasks.rank.plan_nodes import NodeExecutor, Outcome
from prefect_rlhf.rlhf_tasks.spec import NodeKey, NodeRequest
from prefect_rlhf.rlhf_tasks.system.rank_process import OutOfMemory
from prefect_rlhf.rlhf_tasks.user_code.rewards import read_samples
from tests.rlhf_tasks.plans import generation_spec
from tests.rlhf_tasks.settings import DEADLINES
from tests.tiny_runs import ppo_config


def reported(folder: Path, max_completion_length: int) -> tuple[int, int]:
    """(bytes of the largest message of an iteration, tokens that it generated) of a PPO run on one rank."""
    config = ppo_config(
        folder,
        sampling={"max_completion_length": max_completion_length},
        cluster={"devices_per_host": 1},
    )
    prepared, parts = prepare(config), list[SavedPart]()
    plan = prepared.plan
    run_folder = folder / f"run-{max_completion_length}"
    run_folder.mkdir()
    prepared.rows.keep(run_folder)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    executor = NodeExecutor(0, parts.append)
    executor.load(
        generation_spec(
            plan,
            0,
            json.loads(config.model_dump_json()),
            run_folder,
            store.port,
            "test",
            attempt=1,
            iterations=1,
        )
    )
    requests = Sequencer(plan, "test", 1, DEADLINES).requests(0)[0]
    results = [Done(result=executor.execute(r, plan.node(r.key.node))) for r in requests]
    executor._run._writer.close()  # when all parts are written
    executor.close()
    tokens = sum(len(row["completion"]) for row in read_samples(run_folder, config.batch_size))
    assert len(parts) == 4  # actor and critic, before and after the iteration
    return max(len(message.model_dump_json()) for message in [*results, *parts]), tokens


def performs(perform):
    """An executor whose nodes all do this, and a request."""
    executor = NodeExecutor(0, lambda part: None)
    executor._run = SimpleNamespace(device=torch.device("cpu"), perform=perform, versions=dict)  # type: ignore[assignment]
    key = NodeKey(run="test", attempt=1, generation=0, iteration=0, node="call")
    return executor, NodeRequest(key=key, number=0, first_sample=0, versions={}, deadline_s=60.0)


def test_a_nodes_peak_of_memory_is_its_own():
    def perform(node, request):
        if node is not None:
            torch.ones(256 * 2**20, dtype=torch.uint8)
        return Outcome()

    executor, request = performs(perform)
    large, small = (executor.execute(request, node).peak_bytes for node in (object(), None))
    assert large > small + 200e6


@pytest.mark.parametrize(
    "nothing_left", [lambda: torch.empty(2**60), lambda: bytearray(2**62)], ids=["torch", "python"]
)
def test_a_call_that_runs_out_of_memory_says_what_makes_it_less(nothing_left):
    executor, request = performs(lambda node, request: nothing_left())
    with pytest.raises(
        OutOfMemory, match=r"call of iteration 0 has no memory left on cpu .* more micro_batches"
    ):
        executor.execute(request, None)


def test_another_error_of_a_call_stays_what_it_is():
    executor, request = performs(lambda node, request: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        executor.execute(request, None)


@pytest.mark.timeout(600)
def test_what_a_rank_reports_does_not_grow_with_the_number_of_tokens(tmp_path):
    short, few = reported(tmp_path, 2)
    long, many = reported(tmp_path, 60)
    assert many > 10 * few
    assert abs(long - short) < 200  # digits of the metrics
