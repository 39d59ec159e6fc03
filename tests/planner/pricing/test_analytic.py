"""Computed profiles, read by what reads measured ones; and devices fitted to measured profiles."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.planner.plan.build import build_plan
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.workload import Lengths, RoleModel, Workload
from prefect_rlhf.planner.pricing.analytic import computed_profile, recalibrated, with_measured_moves
from prefect_rlhf.planner.pricing.calls import CostModel
from prefect_rlhf.planner.pricing.devices import PRESETS, DeviceLink, preset
from prefect_rlhf.planner.pricing.figures import MeasuredProfile, ProfileTables, read_profiles, write_profiles
from prefect_rlhf.planner.pricing.plans import price_plan
from prefect_rlhf.planner.pricing.rooflines import Roofline, sizes
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from prefect_rlhf.rlhf_tasks.profiling.measurements import Grid, Measurements, Timed, TimedExchange

GRID = Grid.around(256, 128, 1024, 4096)
CONTEXTS = sorted({*GRID.contexts, *GRID.lengths})
CLUSTER = Cluster(2, 8)
DEVICE = preset("a100-80g-sxm")
SHAPE = ModelShape.from_config(
    {
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "max_position_embeddings": 4096,
    }
)
PROFILE = computed_profile(DEVICE, CLUSTER, SHAPE, GRID, 2)


def both(head="lm", tp=1) -> tuple[ProfileTables, Roofline]:
    """The table and what it is of."""
    return ProfileTables(PROFILE, head, tp, False), Roofline(
        DEVICE, sizes(SHAPE, head, tp), head, tp, False, 2
    )


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_at_every_point_a_table_answers_as_the_roofline(tp):
    assert GRID.tokens == (128, 512, 2048, 8192), "of tokens it has all powers of two up to the last"
    assert CONTEXTS == [128, 256, 512, 1024]
    same = pytest.approx
    for head in ("lm", "scalar"):
        table, roofline = both(head, tp)
        points = [(kind, 2**p, c) for kind in ("forward", "backward") for p in range(14) for c in CONTEXTS]
        if head == "lm":
            points += [("prefill", 2**p * c, c) for p in range(9) for c in CONTEXTS]
            points += [("decode", 2**p, c) for p in range(9) for c in CONTEXTS]
        for kind, tokens, context in points:
            of_layer = table.layer_s(kind, tokens, context)
            assert of_layer == same(roofline.layer_s(kind, tokens, context), rel=1e-9)
            assert table.head_s(kind, tokens, context) == same(
                roofline.head_s(kind, tokens, context), rel=1e-6
            )
            assert table.embedding_s(kind, tokens) == same(roofline.embedding_s(kind, tokens), rel=1e-9)
        for parameters in (10**5, 10**9):
            assert table.update_s(parameters, 1) == same(roofline.update_s(parameters, 1), rel=1e-9)


EXCHANGES = ("all_reduce", "all_gather", "reduce_scatter", "share", "send", "redistribute")


@pytest.mark.parametrize("kind", EXCHANGES)
def test_exchanges_of_any_size_take_as_long_as_by_the_links(kind):
    table, roofline = both()
    for crosses, ranks in ((False, (1, 2, 4, 8)), (True, (2, 4, 8, 16))):
        for n in ranks if kind not in ("send", "redistribute") else (2,):
            for size_bytes in (0, 1000, 10**9):
                expected = roofline.exchange_s(kind, n, size_bytes, crosses)
                assert table.exchange_s(kind, n, size_bytes, crosses) == pytest.approx(expected, rel=1e-9)


@given(st.floats(1, 8192), st.floats(1, 256), st.floats(128, 1024), st.sampled_from([1, 8]))
def test_between_points_a_table_says_as_much_or_little_more(tokens, rows, context, tp):
    table, roofline = both("lm", tp)
    points = (("forward", tokens), ("backward", tokens), ("prefill", rows * context), ("decode", rows))
    for kind, n in points:
        layer_s = roofline.layer_s(kind, n, context)
        assert layer_s * (1 - 1e-9) <= table.layer_s(kind, n, context) <= 1.2 * layer_s
        head_s = roofline.head_s(kind, n, context)
        assert (
            head_s * (1 - 1e-6)
            <= table.head_s(kind, n, context)
            <= (4 / 3 if kind == "prefill" else 1.2) * head_s
        )
        assert table.embedding_s(kind, n) == pytest.approx(roofline.embedding_s(kind, n), rel=1e-9)


def test_a_prompt_alone_of_a_length_between_points_is_priced_too(tiny):
    """It has fewer tokens than one of the next longer point, and a small head is quicker than the embedding."""
    slot, local = preset("cpu-slot"), sizes(tiny, "lm", 2)
    table = ProfileTables(computed_profile(slot, Cluster(1, 2), tiny, GRID, 4), "lm", 2, False)
    roofline = Roofline(slot, local, "lm", 2, False, 4)
    for tokens in (129, 150, 200, 700):
        head_s = roofline.head_s("prefill", tokens, tokens)
        assert head_s <= table.head_s("prefill", tokens, tokens) <= 4 / 3 * head_s


def test_among_ranks_between_powers_of_two_collectives_are_a_sixteenth_cheaper_at_most():
    table, roofline = both()
    for kind, ranks, size_bytes in product(("all_reduce", "all_gather"), range(2, 17), (0, 10**6, 10**9)):
        expected = roofline.exchange_s(kind, ranks, size_bytes, True)
        found = table.exchange_s(kind, ranks, size_bytes, True)
        assert expected * (15 / 16 - 1e-9) <= found <= expected * (1 + 1e-9)


def test_each_of_several_ranks_updates_its_share_alone():
    table, roofline = both()
    assert table.update_s(10**9, 8) == pytest.approx(roofline.update_s(10**9, 8), rel=1e-6)
    assert roofline.update_s(10**9, 8) == pytest.approx(roofline.update_s(10**9 / 8, 1), rel=1e-6)


def test_a_tp_degree_that_would_leave_a_rank_without_heads_is_left_out(tiny):
    assert tiny.query_heads == 4
    assert computed_profile(DEVICE, CLUSTER, tiny, GRID, 2).tp_degrees == {1, 2, 4}
    assert computed_profile(DEVICE, Cluster(1, 6), SHAPE, GRID, 2).tp_degrees == {1, 2, 3, 6}


def test_links_without_latency_are_no_fault(tiny):
    free = DEVICE.model_copy(update={"inside_host": DeviceLink(bytes_per_s=1e9, latency_s=0)})
    table = ProfileTables(computed_profile(free, Cluster(1, 2), tiny, GRID, 2), "lm", 2, False)
    assert table.exchange_s("all_gather", 2, 0, False) == 0
    assert table.exchange_s("send", 2, 800, False) == pytest.approx(1e-6)


def test_one_device_exchanges_nothing(tiny):
    assert computed_profile(DEVICE, Cluster(1, 1), tiny, GRID, 2).exchanges == ()


def test_it_comes_back_from_its_file(tmp_path):
    path = tmp_path / "computed.json"
    write_profiles([PROFILE], path)
    assert read_profiles(path) == (PROFILE,)
    assert PROFILE.computed_from == "preset of a100-80g-sxm"


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("hidden", [16, 512, 8192])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_device_recalibrated_by_its_own_profile_is_the_device(name, hidden, family, llama):
    """Whether arithmetic, memory traffic or overhead is most of a layer."""
    device, heads = preset(name), {"model_type": family, "num_attention_heads": 2, "num_key_value_heads": 2}
    shape = llama(hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=2, **heads)
    again = recalibrated(device, computed_profile(device, CLUSTER, shape, GRID, 2))
    assert again.sources[-1] == f"calibrated by a profile computed from the preset of {name}"
    for link in ("inside_host", "between_hosts"):
        assert getattr(again, link).model_dump() == pytest.approx(getattr(device, link).model_dump())
    fitted = (
        "flops_per_s",
        "matmul_efficiency",
        "layer_overhead_s",
        "decode_overhead_s",
        "optimizer_overhead_s",
    )
    for figure in fitted:
        assert getattr(again, figure) == pytest.approx(getattr(device, figure), rel=1e-4), figure
    same = {*fitted, "sources", "inside_host", "between_hosts"}
    assert again.model_dump(exclude=same) == device.model_dump(exclude=same)


@pytest.fixture
def cost_of():
    """cost_of(*profiles): PPO's cost model on 2 x 8 GPUs, with 100 prompt and 300 new tokens."""

    def make(*profiles) -> CostModel:
        models = {
            role: RoleModel(shape=SHAPE, head="lm" if role in ("actor", "ref") else "scalar")
            for role in ("actor", "ref", "critic", "reward")
        }
        workload = Workload(prompt_tokens=100, new_tokens=Lengths.fixed(300), itemsize=2, recompute="full")
        return CostModel(CLUSTER, DEVICE, models, workload, profiles)

    return make


@pytest.mark.parametrize(("dp", "tp", "pp"), [(16, 1, 1), (4, 4, 1), (2, 8, 1), (4, 2, 2)])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_plan_takes_as_long_by_the_table_as_by_the_roofline(
    make_graph, assign, cost_of, dp, tp, pp, micro_batches
):
    graph = make_graph(n_seqs=256)
    whole = {
        call.name: assign(list(range(16)), dp=dp, tp=tp, pp=pp)
        if call.kind == "generate"
        else assign(list(range(16)), dp=dp, tp=tp, pp=pp, micro_batches=micro_batches)
        for call in graph.calls
    }
    plan = build_plan(graph, whole, CLUSTER)
    analytic, computed = (price_plan(plan, model) for model in (cost_of(), cost_of(PROFILE)))
    assert computed.iteration_time_s == pytest.approx(analytic.iteration_time_s, rel=0.02)


TOKENS = (256, 1024, 4096)


@pytest.fixture
def slow():
    """A device that reaches less than the preset says, with slower links and a slower host."""
    return preset("cpu-slot").model_copy(
        update={
            "matmul_efficiency": 0.2,
            "memory_bytes_per_s": 1e12,
            "layer_overhead_s": 3e-3,
            "decode_overhead_s": 2e-3,
            "optimizer_overhead_s": 5e-3,
            "inside_host": DeviceLink(bytes_per_s=3e8, latency_s=2e-3),
        }
    )


@pytest.fixture
def measured(slow, llama) -> MeasuredProfile:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    shape = llama(hidden_size=512, num_hidden_layers=4, intermediate_size=1024, **heads)
    timing = Roofline(slow, sizes(shape, "lm", 1), "lm", 1, False, 4)
    operations = [
        Timed(operation="layer/forward", tp=1, tokens=n, context=64, seconds=timing.layer_s("forward", n, 64))
        for n in TOKENS
    ]
    operations += [
        Timed(operation="layer/decode", tp=1, tokens=n, context=64, seconds=timing.layer_s("decode", n, 64))
        for n in (1, 4)
    ]
    operations += [
        Timed(operation="optimizer", tp=1, tokens=n, context=0, seconds=timing.update_s(n, 1))
        for n in (10**5, 10**6)
    ]
    sends = [
        TimedExchange(
            kind="send",
            ranks=2,
            crosses_hosts=False,
            size_bytes=n,
            seconds=slow.send_s(n, crosses_hosts=False),
        )
        for n in (2**10, 2**20, 2**24)
    ]
    found = Measurements(operations=tuple(operations), exchanges=tuple(sends), process_bytes=7)
    return MeasuredProfile.of("cpu-slot", 1, 2, shape, 4, [found], dispatch_s=0.125)


def test_constants_come_back(slow, measured):
    fitted = recalibrated(preset("cpu-slot").model_copy(update={"memory_bytes_per_s": 1e12}), measured)
    for field in ("layer_overhead_s", "decode_overhead_s", "optimizer_overhead_s", "matmul_efficiency"):
        assert getattr(fitted, field) == pytest.approx(getattr(slow, field), rel=0.02), field
    for size_bytes in (1e3, 1e7):
        assert fitted.send_s(size_bytes, False) == pytest.approx(slow.send_s(size_bytes, False))
    assert (fitted.dispatch_s, fitted.process_bytes) == (0.125, 7)


def test_what_a_move_takes_beyond_its_message_counts_per_layer_or_per_sample_and_key(measured):
    before = preset("cpu-slot")
    exchanges = tuple(
        TimedExchange(kind="redistribute", ranks=2, crosses_hosts=False, size_bytes=n, seconds=1e-3 + n / 5e8)
        for n in (2**10, 2**24)
    )
    moved = tuple(
        Timed(operation="reallocation", tp=1, tokens=n, context=c, seconds=1e-3 + 4 * n / 5e8 + c * 0.25)
        for n, c in ((10**5, 1), (10**6, 4))
    )
    sent = Timed(operation="transfer", tp=1, tokens=1000, context=0, seconds=1e-3 + 4000 / 5e8 + 1000 * 2e-6)
    others = [o for o in measured.operations if o.operation not in ("reallocation", "transfer")]
    update = {"exchanges": exchanges, "operations": (*others, *moved, sent)}
    after = with_measured_moves(before, measured.model_copy(update=update))
    assert after.transfer_overhead_s == pytest.approx(2e-6)
    assert after.reallocation_overhead_s == pytest.approx(0.25)
    assert after.send_s(2**20, False) == pytest.approx(1e-3 + 2**20 / 5e8)
    assert with_measured_moves(before, measured).reallocation_overhead_s == before.reallocation_overhead_s


def test_what_was_not_measured_stays(measured):
    before = preset("cpu-slot")
    after = recalibrated(before, measured)
    assert after.between_hosts == before.between_hosts
    assert after.memory_bytes == before.memory_bytes


@pytest.mark.parametrize(
    ("left_out", "field"),
    [
        ("layer/forward", "layer_overhead_s"),
        ("layer/decode", "decode_overhead_s"),
        ("optimizer", "optimizer_overhead_s"),
    ],
)
def test_an_overhead_that_was_not_measured_stays(measured, left_out, field):
    operations = tuple(o for o in measured.operations if o.operation != left_out)
    before = preset("cpu-slot")
    after = recalibrated(before, measured.model_copy(update={"operations": operations}))
    assert getattr(after, field) == getattr(before, field) > 0
    assert getattr(recalibrated(before, measured), field) != getattr(before, field)


def test_a_device_faster_than_its_data_sheet_gets_a_higher_peak(measured):
    before = preset("cpu-slot").model_copy(update={"flops_per_s": 1e9, "memory_bytes_per_s": 1e12})
    after = recalibrated(before, measured)
    assert after.matmul_efficiency == 1
    assert after.flops_per_s == pytest.approx(0.2 * preset("cpu-slot").flops_per_s, rel=0.02)


def test_passes_that_memory_traffic_bounds_say_nothing_of_arithmetic(slow, measured):
    """Were they taken for arithmetic, the overhead would hold the seconds of reading weights."""
    starved = slow.model_copy(update={"memory_bytes_per_s": 4e9})
    timing = Roofline(starved, sizes(measured.model, "lm", 1), "lm", 1, False, 4)
    passes = tuple(
        Timed(operation="layer/forward", tp=1, tokens=n, context=64, seconds=timing.layer_s("forward", n, 64))
        for n in (1, 4, 16, 64, 256, 1024, 4096)
    )
    weights_s = starved.compute_s(0, sizes(measured.model, "lm", 1).layer * 4)
    assert passes[0].seconds > starved.layer_overhead_s + weights_s > 1.5 * starved.layer_overhead_s
    before = preset("cpu-slot").model_copy(update={"memory_bytes_per_s": 4e9})
    after = recalibrated(before, measured.model_copy(update={"operations": passes}))
    assert after.layer_overhead_s == pytest.approx(starved.layer_overhead_s)
    assert after.matmul_efficiency == pytest.approx(starved.matmul_efficiency)
    few = recalibrated(before, measured.model_copy(update={"operations": passes[:3]}))
    assert few.layer_overhead_s == pytest.approx(starved.layer_overhead_s)
    assert few.matmul_efficiency == before.matmul_efficiency, "arithmetic does not show"
