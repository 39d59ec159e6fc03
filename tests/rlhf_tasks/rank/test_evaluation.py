"""The evaluation node on a rank: when it works, and what a resumed run makes of it."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from prefect_rlhf.flows.run.prepare import Prepared, prepare
from prefect_rlhf.rlhf_tasks.checkpoint.commits import RunSnapshots
from prefect_rlhf.rlhf_tasks.checkpoint.journals import BEFORE
from prefect_rlhf.rlhf_tasks.protocol.messages import SavedPart, WriteCommit
from prefect_rlhf.rlhf_tasks.protocol.sequencer import Sequencer
from prefect_rlhf.rlhf_tasks.rank.plan_nodes import NodeExecutor
from prefect_rlhf.rlhf_tasks.spec import NodeResult
from tests.rlhf_tasks.checkpoint.test_commits import Spec
from tests.rlhf_tasks.plans import generation_spec
from tests.rlhf_tasks.settings import DEADLINES
from tests.tiny_runs import ppo_config, write_prompts

Results = dict[int, dict[str, dict[int, NodeResult]]]


def run(prepared: Prepared, folder: Path, iterations: range) -> tuple[Results, list[SavedPart]]:
    """(iteration -> node -> rank -> result, the parts that were saved) of some iterations on one rank.

    They begin at the commit of the first iteration's number, where the run folder has that.
    """
    plan, parts, results = prepared.plan, list[SavedPart](), Results()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    executor = NodeExecutor(0, parts.append)
    executor.load(
        generation_spec(
            plan,
            0,
            json.loads(prepared.config.model_dump_json()),
            folder,
            store.port,
            "test",
            attempt=1,
            restore_step=iterations.start or None,
            iterations=prepared.iterations,
        )
    )
    first = iterations.start
    sequencer = Sequencer(plan, "test", 1, DEADLINES, first_iteration=first, first_sample=first * plan.n_seqs)
    for iteration in iterations:
        requests = sequencer.requests(iteration)[0]
        done = [executor.execute(request, plan.node(request.key.node)) for request in requests]
        results[iteration] = {result.key.node: {0: result} for result in done}
    executor._run._writer.close()  # when all parts are written
    executor.close()
    return results, parts


def commit(prepared: Prepared, folder: Path, step: int, results: Results, parts: list[SavedPart]) -> None:
    """Commit what a run has saved as a step."""
    config, plan, done = prepared.config, prepared.plan, range(step)
    saved = {f"save_{part.role}": {0: part.details} for part in parts if part.step == step}
    versions = {role: step for role, where in plan.roles.items() if where.changes}
    order = WriteCommit(step, tuple(done), saved, step * config.batch_size, versions, plan)
    snapshots = RunSnapshots(Spec(str(folder), config=config.model_dump(mode="json")))
    snapshots.commit(order, {t: results[t] for t in done})


def evaluations(results: Results) -> dict[int, dict[str, float]]:
    return {iteration: dict(nodes["evaluate_actor"][0].metrics) for iteration, nodes in results.items()}


@pytest.mark.timeout(600)
@pytest.mark.whole
def test_every_nth_iteration_and_the_last_are_evaluated_and_a_resumed_run_finds_the_same(tmp_path):
    held_out = str(write_prompts(tmp_path / "held_out.jsonl", 3))
    asked = {"data": held_out, "every": 2, "temperature": 1.0, "on_start": True}
    one = {"devices_per_host": 1}
    config = ppo_config(tmp_path, total_iterations=5, evaluation=asked, cluster=one)
    prepared, folder = prepare(config), tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    prepared.keep_rows(folder)
    results, parts = run(prepared, folder, range(5))
    found = evaluations(results)
    assert [iteration for iteration, metrics in found.items() if metrics] == [1, 3, 4]
    assert all(
        {"eval/reward", "eval/length_reward/mean"} <= metrics.keys() for metrics in (found[1], found[4])
    )
    assert found[3] != found[1], "the weights have changed"
    starts = {t: nodes["evaluate_actor_at_start"][0] for t, nodes in results.items()}
    assert [t for t, start in starts.items() if start.details] == [0]
    before = starts[0].details[BEFORE]
    assert before.keys() == found[1].keys()
    assert before != found[1]
    assert all(not start.metrics for start in starts.values()), "they are of no iteration's end"
    nodes = [node.name for node in prepared.plan.nodes]
    assert nodes.index("evaluate_actor_at_start") < nodes.index("actor_train")

    commit(prepared, folder, 2, results, parts)
    again, _ = run(prepared, folder, range(2, 5))
    assert evaluations(again) == {t: found[t] for t in (2, 3, 4)}
