"""Computed profiles: a table of the roofline, read by what reads measured profiles."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.plan.build import build_plan
from planner.plan.mesh import Cluster
from planner.plan.workload import Lengths, RoleModel, Workload
from planner.pricing.analytic import computed_profile
from planner.pricing.calibrate import recalibrated
from planner.pricing.calls import CostModel
from planner.pricing.device_share import sizes
from planner.pricing.devices import PRESETS, DeviceLink, preset
from planner.pricing.measured import ProfileTables
from planner.pricing.plans import price_plan
from planner.pricing.profile_cache import read_profiles, write_profiles
from planner.pricing.rooflines import Roofline
from rlhf_tasks.parallel.layout.shape import ModelShape
from rlhf_tasks.profiling.measurements import Grid

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
