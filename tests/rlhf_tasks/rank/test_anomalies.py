"""What an anomaly leaves on disk is computed again on one rank, to the same values, and damage to it is named."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, make_config
from prefect_rlhf.rlhf_tasks.algorithms.shared.guards import AnomalyError
from prefect_rlhf.rlhf_tasks.checkpoint.dumps import dump_folder, read_dump
from prefect_rlhf.rlhf_tasks.checkpoint.manifest import CheckpointError, write_manifest
from prefect_rlhf.rlhf_tasks.protocol.sequencer import Sequencer
from prefect_rlhf.rlhf_tasks.rank import anomalies
from prefect_rlhf.rlhf_tasks.rank.plan_nodes import NodeExecutor
from prefect_rlhf.rlhf_tasks.rank.replay import Replay
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan
from tests import rendezvous
from tests.rlhf_tasks.algorithms.registered import RECORD, install, installed
from tests.rlhf_tasks.plans import generation_spec
from tests.rlhf_tasks.settings import DEADLINES
from tests.tiny_runs import write_model

FUNCTIONS = """
import math

from prefect_rlhf.rlhf_tasks.algorithms.sft.functions import *

def actor_train(engine, batch, context):
    if context.iteration == 1 and (context.run_folder / "weights").exists():
        next(engine.optimizer.shard_state()).tensor[0] = math.inf

    engine.state["calls"] = engine.state.get("calls", 0) + 1

    def loss(logits, micro):
        total = -engine.logprobs(logits, micro).sum() / engine.state["calls"]
        is_bad = context.iteration == 1 and steps.applied + steps.skipped == 1
        bad = is_bad and not (context.run_folder / "weights").exists()
        return LossTerms(total * math.nan if bad else total, {"square": total.detach() ** 2})

    tokens = engine.sum_over_dp(counts_per_block(batch, context, "response_mask").to(engine.device))
    steps = Steps(engine, loss, tokens.tolist(), context.micro_batches, ["square"], counted="response_mask")
    for step in optimizer_steps(batch, context, config_of(context)):
        steps.take(step)
    return CallOutput(metrics={"loss/tuned": steps.mean("loss"), **steps.end("actor")})

def config_of(context):
    return context.config.optimizer
"""
"""SFT whose second step of the second iteration has a loss that is not a number; or, where the run folder has a file
`weights`, one master weight becomes infinite before that iteration's first step."""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The algorithm `tuned`, installed in a folder; models and rows beside it."""
    install(
        tmp_path / "site",
        "tuned-models",
        {"tuned": "tuned:ALGORITHM"},
        {"tuned/__init__.py": RECORD, "tuned/functions.py": FUNCTIONS},
    )
    write_model(tmp_path / "actor")
    rows = [{"prompt": f"{i:x} says ", "completion": "ab" * (i % 5 + 1)} for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "site"


def prepared_run(folder: Path, ranks: int, place: str, **changes: Any) -> tuple[str, dict[str, Any], str]:
    """(plan, configuration, run folder) of a run of `tuned`, as a rank is told."""
    document = {
        "type": "tuned",
        "dtype": "float32",
        "models": {"actor": str(folder / "actor")},
        "data": {"train": str(folder / "rows.jsonl")},
        "output_dir": str(folder / "runs"),
        "batch_size": 12,
        "num_mini_batches": 4,
        "total_iterations": 3,
        "optimizer": {"learning_rate": 1e-3},
        "cluster": {"devices_per_host": ranks},
        "plan": {"actor_train": f"{place} m2"},
    }
    prepared = prepare(make_config({**document, **changes}))
    run_folder = folder / "run"
    run_folder.mkdir()
    prepared.rows.keep(run_folder)
    return prepared.plan.model_dump_json(), json.loads(prepared.config.model_dump_json()), str(run_folder)


def iterate(
    rank: int, plan_json: str, config: dict, folder: str, port: int, prefix: str, n_ranks: int
) -> Any:
    """The metrics of each iteration on a rank; where an anomaly ends the run, the sentence comes last."""
    plan, seen = ExecutionPlan.model_validate_json(plan_json), list[Any]()
    executor = NodeExecutor(rank, lambda part: None)
    executor.load(generation_spec(plan, rank, config, folder, port, prefix))
    try:
        for iteration in range(3):
            metrics: dict[str, float] = {}
            for request in (
                Sequencer(plan, "test", 0, DEADLINES).requests(iteration, in_snapshot=False).get(rank, ())
            ):
                metrics |= executor.execute(request, plan.node(request.key.node)).metrics
            seen.append(metrics)
    except AnomalyError as error:
        seen.append(str(error))
    executor.close()
    return seen


def alone(plan: str, config: dict, folder: str) -> list[Any]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return iterate(0, plan, config, folder, store.port, "alone", 1)


def on_ranks(rank: int, world: int, site: str, *of_run: Any) -> list[Any]:
    dist.destroy_process_group()
    torch.set_num_threads(1)
    with installed(Path(site)):
        return iterate(rank, *of_run, rendezvous.port, rendezvous.prefix, world)


def reports(replay: Replay) -> list[tuple[Mapping[str, float], Mapping[str, float] | None, str]]:
    return [(pair.recorded, pair.replayed, pair.place) for pair in replay.steps]


def test_a_skipped_step_and_those_after_it_are_computed_again_to_the_same_bits(site, tmp_path):
    with installed(site):
        *_, folder = of_run = prepared_run(tmp_path, 1, "0")
        first, second, third = alone(*of_run)
        assert [one["skipped_steps/actor"] for one in (first, second, third)] == [0, 1, 0]
        replay = Replay(dump_folder(Path(folder), "actor", 1))
        metrics = replay.run()
    assert {name: metrics[name] for name in second} == second
    (before, none, _), (bad, again, place), (after, once_more, nothing), (last, last_again, _) = reports(
        replay
    )
    assert (none, math.isnan(bad["loss"]), bad["skipped"], after["skipped"]) == (None, True, 1.0, 0.0)
    assert math.isfinite(before["loss"])
    assert repr(again) == repr(bad), "NaN for NaN"
    assert (once_more, last_again, nothing) == (after, last, "")
    assert place == "the loss, of finite outputs"
    assert not [pair.number for pair in replay.steps if pair.difference(replay.tolerance)]


def test_infinite_weights_and_a_value_that_nothing_in_the_dump_explains_are_named(site, tmp_path):
    with installed(site):
        *_, folder = of_run = prepared_run(tmp_path, 1, "0")
        Path(folder, "weights").touch()
        alone(*of_run)
        place = dump_folder(Path(folder), "actor", 1)
        replay = Replay(place)
        replay.run()
        assert [pair.place.split(" of ")[0] for pair in replay.steps] == ["", *["weights"] * 3]
        assert not any(pair.difference(replay.tolerance) for pair in replay.steps), "NaN is NaN"
        steps = [dict(step) for step in replay.dump.steps]
        steps[2]["grad_norm"] = 1.0
        write_manifest(place, replay.dump.model_copy(update={"steps": tuple(steps)}))
        damaged = Replay(place)
        damaged.run()
    assert [pair.difference(damaged.tolerance) for pair in damaged.steps] == ["", "", "grad_norm", ""]


@pytest.mark.dist
@pytest.mark.parametrize("place", ["0-1 d2", pytest.param("0-1 p2", marks=pytest.mark.slow), "0-1 t2"])
def test_a_run_that_stops_on_two_ranks_leaves_a_dump_that_one_rank_computes_again(
    ranks, site, tmp_path, place
):
    with installed(site):
        *_, folder = of_run = prepared_run(tmp_path, 2, place, on_anomaly="stop")
        seen = ranks.run(2, on_ranks, str(site), *of_run)
        (first, sentence), other = seen[0], seen[1]
        assert other == [first, sentence]
        dumped = dump_folder(Path(folder), "actor", 1)
        assert "iteration 1: actor: optimizer step 1 has loss nan" in sentence
        assert f"prefect-rlhf replay {dumped}" in sentence
        assert [path.name for path in dumped.parent.iterdir()] == [dumped.name]
        replay = Replay(dumped)
        assert replay.run() == {}
        (_, none, _), (bad, again, place) = reports(replay)
        assert (none, bad["skipped"], again["skipped"], place) == (None, 1, 1, "the loss, of finite outputs")
        assert not any(pair.difference(replay.tolerance) for pair in replay.steps)

        shard = next(dumped.glob("state.rank-*"))
        shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
        with pytest.raises(CheckpointError, match=f"{shard.name}: its content has changed"):
            Replay(dumped)


FAULTS = {
    "write_checked": (0, OSError(28, "No space left on device")),
    "_take_files": (0, ValueError("not a note")),
    "host_copies": (1, MemoryError("does not pin")),
}
"""Function of a dump -> the rank on which it fails, and how."""


def on_ranks_of_which_one_fails(rank: int, world: int, site: str, *of_run: Any) -> list[int]:
    """How many iterations there were in each run, one for each of FAULTS."""
    dist.destroy_process_group()
    torch.set_num_threads(1)
    counts = []
    with installed(Path(site)):
        for name, (where, error) in FAULTS.items():
            with pytest.MonkeyPatch.context() as patch:
                if rank == where:
                    patch.setattr(anomalies, name, Mock(side_effect=error))
                prefix = f"{rendezvous.prefix}{name}"
                counts.append(len(iterate(rank, *of_run, rendezvous.port, prefix, world)))
    return counts


@pytest.mark.dist
def test_a_dump_that_fails_on_one_rank_leaves_nothing_and_ends_no_run(ranks, site, tmp_path):
    with installed(site):
        *_, folder = of_run = prepared_run(tmp_path, 2, "0-1 d2")
        left = dump_folder(Path(folder), "actor", 0).with_suffix(".tmp")
        left.mkdir(parents=True)
        assert ranks.run(2, on_ranks_of_which_one_fails, str(site), *of_run) == [[3, 3, 3]] * 2
    assert list(left.parent.iterdir()) == []


def test_a_second_anomaly_and_one_too_large_leave_no_dump_and_end_no_run(site, tmp_path, monkeypatch):
    with installed(site):
        *_, folder = of_run = prepared_run(tmp_path, 1, "0")
        with monkeypatch.context() as patch:
            patch.setattr(anomalies, "MOST_BYTES", 100)
            assert len(alone(*of_run)) == 3
        assert list(Path(folder, "anomalies").iterdir()) == [] if Path(folder, "anomalies").exists() else True
        dump_folder(Path(folder), "actor", 0).mkdir(parents=True)
        assert len(alone(*of_run)) == 3
        assert [path.name for path in Path(folder, "anomalies").iterdir()] == ["actor-iteration-00000000"]


def test_a_dump_of_another_version_or_without_its_model_is_refused(site, tmp_path):
    with installed(site):
        *_, folder = of_run = prepared_run(tmp_path, 1, "0")
        alone(*of_run)
        place = dump_folder(Path(folder), "actor", 1)
        dump = Replay(place).dump
        (tmp_path / "actor").rename(tmp_path / "elsewhere")
        with pytest.raises(ConfigError, match=str(tmp_path / "actor")):
            Replay(place)
        write_model(tmp_path / "actor", num_hidden_layers=1)
        with pytest.raises(CheckpointError, match=r"is of another model than .*actor now has"):
            Replay(place)
    with pytest.raises(
        CheckpointError, match=r"was written by prefect-rlhf .* and this is 9.9, which may compute other"
    ):
        read_dump(place, "9.9")
    write_manifest(place, dump.model_copy(update={"schema_version": 99}))
    with pytest.raises(CheckpointError, match=r"schema 99; this version of prefect-rlhf reads 1"):
        Replay(place)
