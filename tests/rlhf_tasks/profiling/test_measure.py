"""What ranks measure: every operation and exchange, on the engine's own modules, for any family and tp."""

import json
import math
import time
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from prefect_rlhf.planner.pricing.figures import MeasuredProfile, ProfileTables
from prefect_rlhf.planner.pricing.rooflines import sizes
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, join_world, leave_world
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import read_shape
from prefect_rlhf.rlhf_tasks.profiling import measure as profiling
from prefect_rlhf.rlhf_tasks.profiling.measure import (
    DEEP,
    FEW_STEPS,
    FEWEST_ROUNDS,
    KEYS,
    MANY_SAMPLES,
    MORE_STEPS,
    ROUNDS,
    SHALLOW,
    Bench,
    ProfileExecutor,
    _generation,
    _means_s,
    exchange_sets,
    measure_model,
)
from prefect_rlhf.rlhf_tasks.profiling.measurements import (
    Grid,
    Measurements,
    ProfileSpec,
    pieces_of,
    profile_plan,
)
from tests import rendezvous
from tests.rlhf_tasks.plans import generation_spec
from tests.tiny_models import tiny_config

GRID = Grid(tokens=(8, 32), lengths=(8,), rows=(1, 4), contexts=(4,))


def measure(rank: int, world: int, document: dict) -> list[dict]:
    """All pieces on one rank, once each, by a clock that ticks with every look at it."""
    dist.destroy_process_group()
    spec = ProfileSpec.model_validate(document)
    ticks = iter(range(10**9))
    executor = ProfileExecutor(rank, clock=lambda: float(next(ticks)))
    plan = profile_plan(spec.pieces, world, spec.devices_per_host)
    executor.load(
        generation_spec(plan, rank, document, "", rendezvous.port, rendezvous.prefix, attempt=1, iterations=1)
    )
    # On GPUs a deeper model draws, of layers that do not train.
    with patch.object(profiling, "ROUNDS", 1), patch.dict(profiling.DRAWING, cpu=DEEP + 1):
        found = [executor.measure(spec.pieces[node.name]).model_dump(mode="json") for node in plan.nodes]
    executor.close()
    return found


@pytest.mark.dist
@pytest.mark.parametrize(
    "family", [pytest.param("llama", marks=pytest.mark.whole), pytest.param("qwen3", marks=pytest.mark.slow)]
)
def test_two_ranks_measure_everything_that_plans_on_them_need(ranks, tmp_path, family):
    config = tiny_config(family)
    config.save_pretrained(tmp_path)
    pieces = pieces_of({str(tmp_path): GRID}, 2, 2)
    spec = ProfileSpec(dtype="float32", devices_per_host=2, pieces=pieces)
    per_rank = ranks.run(2, measure, json.loads(spec.model_dump_json()))
    shape = read_shape(tmp_path)
    found = [Measurements.model_validate(piece) for rank in per_rank for piece in rank]
    profile = MeasuredProfile.of("cpu-slot", 1, 2, shape, 4, found)
    assert profile.tp_degrees == {1, 2}
    assert profile.process_bytes > 50e6
    moved = [o for o in profile.operations if o.operation == "reallocation"]
    assert [(o.tp, o.context, o.seconds) for o in moved] == [(1, 1, 1.0), (1, 4, 1.0)]
    assert moved[1].tokens - moved[0].tokens == 3 * sizes(shape, "lm", 1).layer
    (sent,) = [o for o in profile.operations if o.operation == "transfer"]
    assert (sent.tp, sent.tokens, sent.seconds) == (1, MANY_SAMPLES * len(KEYS), 1.0)
    assert profile.lacking() == ""
    for head in ("lm", "scalar"):
        for tp in (1, 2):
            tables = ProfileTables(profile, head, tp, crosses=False)
            for kind in ("forward", "backward"):
                assert tables.layer_s(kind, 20, 8) >= 0
                assert tables.embedding_s(kind, 20) >= 0
                assert tables.head_s(kind, 20, 8) >= 0
            assert tables.update_s(1000, 1) == 1.0  # one tick
            assert tables.exchange_s("send", 2, 1000, False) == 0.5  # there and back in a tick
            for kind in ("all_reduce", "all_gather", "reduce_scatter", "share", "redistribute"):
                assert tables.exchange_s(kind, 2, 1000, False) == 1.0
    lm = ProfileTables(profile, "lm", 2, crosses=False)
    assert all(lm.layer_s(kind, 2, 4) >= 0 and lm.head_s(kind, 2, 4) >= 0 for kind in ("prefill", "decode"))


@pytest.mark.gpu
def test_a_gpu_measures_its_own_models(tmp_path):
    config, device = tiny_config("llama"), torch.device("cuda", 0)
    config.save_pretrained(tmp_path)
    join_world(dist.HashStore(), 0, 1, 60.0, device)
    try:
        bench = Bench(
            config,
            read_shape(tmp_path),
            torch.bfloat16,
            ProcessGroups([(0,)], 60.0, device),
            time.perf_counter,
            math.inf,
        )
        found = measure_model(bench, 1, GRID)
    finally:
        leave_world()
    assert {"layer/forward", "layer/backward", "lm/decode", "optimizer"} <= {
        timed.operation for timed in found.operations
    }


def test_works_are_timed_in_rounds_so_that_a_slow_phase_meets_each_of_them_once():
    """Here the first round is slow, as it mostly is."""
    clock, done = SimpleNamespace(now=0.0), []

    def work(name: str, seconds: float) -> None:
        done.append(name)
        clock.now += seconds * (100 if len(done) <= 2 else 1)

    works = {name: partial(work, name, seconds) for name, seconds in (("short", 1.0), ("long", 5.0))}
    groups = SimpleNamespace(device=torch.device("cpu"))
    found = _means_s(works, (0,), groups, lambda: clock.now)
    assert done == ["short", "long"] * 3
    assert found == {"short": 1.0, "long": 5.0}


@pytest.mark.parametrize("deep", [DEEP, 16])
def test_steps_that_take_longer_with_more_context_do_not_count_in_the_prefill(deep):
    """Here a layer's prefill takes as long as a step after a prompt, and a step's seconds are its context."""
    prompt, found = 16, {}
    for name, layers in (("shallow", SHALLOW), ("drawing", deep)):
        for steps in (FEW_STEPS, MORE_STEPS):
            of_layer = 10 * prompt + sum(prompt + step for step in range(1, steps + 1))
            found["generate", name, prompt, 4, steps] = float(layers * of_layer)
    grid = Grid(tokens=(), lengths=(), rows=(4,), contexts=(prompt,))
    timed = {one.operation: one for one in _generation(found, 1, grid, deep)}
    step = timed["layer/decode"]
    assert step.seconds == pytest.approx(step.context, rel=0.05)
    assert timed["layer/prefill"].seconds == pytest.approx(10 * prompt, rel=0.15)


def timed_turns(took: dict[str, list[float]], budget_s: float = math.inf) -> dict[str, int]:
    """Turns that works have which take so many seconds, one turn after the other (the last one's from then on)."""
    clock, turns = SimpleNamespace(now=0.0), dict.fromkeys(took, 0)

    def work(name: str) -> None:
        clock.now += took[name][min(turns[name], len(took[name]) - 1)]
        turns[name] += 1

    groups = SimpleNamespace(device=torch.device("cpu"))
    _means_s({name: partial(work, name) for name in took}, (0,), groups, lambda: clock.now, budget_s)
    return turns


def test_a_work_whose_times_agree_has_no_further_turn():
    unsteady = [1.0, 1.2, 1.44, 1.728, 2.0736, 2.48832]
    took = {"steady": [1.0, 1.04], "steady later": [9.0, 1.0, 1.04], "unsteady": unsteady}
    assert timed_turns(took) == {"steady": 2, "steady later": 3, "unsteady": ROUNDS}


def test_after_the_time_of_a_piece_there_are_no_more_than_the_fewest_rounds():
    works = {name: [n * 2.0**turn for turn in range(ROUNDS)] for name, n in (("a", 1.0), ("b", 3.0))}
    assert timed_turns(works, 1.0) == dict.fromkeys(works, FEWEST_ROUNDS)
    assert timed_turns(works, 4.0 * (1 + 2 + 4 + 8) - 0.1) == dict.fromkeys(works, 4)


def test_a_plan_of_pieces_has_tp_degrees_that_divide_the_hosts():
    pieces = pieces_of({"a": GRID, "b": GRID}, n_devices=12, devices_per_host=6)
    models = [(piece.folder, piece.tp) for piece in pieces.values() if piece.kind == "model"]
    assert models == [(folder, tp) for folder in "ab" for tp in (1, 2, 3, 6)]
    plan = profile_plan(pieces, 12, 6)
    assert [node.name for node in plan.nodes] == list(pieces)
    assert all(node.devices == tuple(range(12)) for node in plan.nodes)


def test_exchanges_are_measured_among_neighbours_and_across_hosts():
    assert exchange_sets(1, 1) == []
    assert exchange_sets(3, 3) == [(0, 1), (0, 1, 2)]
    assert exchange_sets(8, 4) == [
        (0, 1), (0, 1, 2, 3), (0, 1, 2, 3, 4, 5, 6, 7), (0, 4), (2, 3), (4, 5), (4, 5, 6, 7), (6, 7),
    ]  # fmt: skip
