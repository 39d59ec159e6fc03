"""Measured profiles: interpolation, refusals, the same consumer as analytic ones."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.plan.mesh import Cluster
from planner.plan.workload import Lengths, RoleModel, Workload
from planner.pricing.calls import CostModel
from planner.pricing.devices import preset
from planner.pricing.measured import MeasuredProfile, ProfileError, ProfileTables, Table, rising
from planner.pricing.plans import price_plan
from rlhf_tasks.profiling.measurements import Grid, Measurements, Timed, TimedExchange

POINTS = [(c, n, 1e-3 * (1 + n / 100) * (1 + c / 64)) for c in (16, 64) for n in (8, 64, 512)]


def test_a_table_is_exact_on_its_grid():
    table = Table(POINTS)
    for context, tokens, seconds in POINTS:
        assert table.at(context, tokens) == pytest.approx(seconds, rel=1e-12)


@given(st.floats(1, 2000), st.floats(1, 2000), st.floats(1, 200), st.floats(1, 200))
def test_a_table_of_growing_seconds_is_monotone_between_and_beyond(n, more, context, longer):
    table = Table(POINTS)
    n, more = sorted((n, more))
    context, longer = sorted((context, longer))
    assert table.at(context, n) <= table.at(context, more) * (1 + 1e-12)
    assert table.at(context, n) <= table.at(longer, n) * (1 + 1e-12)


def test_beyond_its_points_a_table_goes_on_straight_and_below_them_it_stays():
    table = Table([(0, 100, 1.0), (0, 200, 1.5)])
    assert table.at(0, 400) == pytest.approx(2.5)
    assert table.at(0, 1) == 1.0
    assert table.at(99, 150) == pytest.approx(1.25)


def test_seconds_that_fall_with_more_tokens_are_taken_for_noise():
    table = Table([(0, 1, 1.0), (0, 2, 4.0), (0, 4, 2.0), (0, 8, 5.0)])
    assert [table.at(0, n) for n in (1, 2, 4, 8)] == [1.0, 3.0, 3.0, 5.0]


@given(st.lists(st.floats(0, 100), max_size=12))
def test_rising_values_are_the_nearest_that_never_fall(values):
    found = rising(values)
    assert all(a <= b for a, b in pairwise(found))
    # Least squares over a cone: the residuals weigh nothing against the values, and never favour a rise
    assert sum((v - f) * f for v, f in zip(values, found, strict=True)) == pytest.approx(0, abs=1e-7)
    for i in range(len(values)):
        assert sum(v - f for v, f in zip(values[i:], found[i:], strict=True)) <= 1e-9 * (1 + sum(values))


def test_the_grid_encloses_the_work_in_powers_of_two():
    grid = Grid.around(n_seqs=100, prompt_tokens=24, total_tokens=72, context=128)
    assert grid.tokens == (64, 256, 1024, 4096, 8192)
    assert grid.lengths == (32, 128)
    assert grid.rows == (1, 16, 128)
    assert grid.contexts == (16, 32, 64)
    assert all(n & (n - 1) == 0 for part in grid for n in part)


def test_contexts_whose_difference_cannot_be_measured_are_one_point():
    assert Grid.around(n_seqs=256, prompt_tokens=16, total_tokens=26, context=128).contexts == (16,)


@pytest.fixture
def cost_of(tiny):
    """cost_of(*profiles): PPO's cost model on 1 x 4 slots for one shape."""

    def make(*profiles, shape=None, itemsize=4) -> CostModel:
        models = {
            role: RoleModel(shape=shape or tiny, head="lm" if role in ("actor", "ref") else "scalar")
            for role in ("actor", "ref", "critic", "reward")
        }
        workload = Workload(
            prompt_tokens=32, new_tokens=Lengths.fixed(32), itemsize=itemsize, recompute="none"
        )
        return CostModel(Cluster(1, 4), preset("cpu-slot"), models, workload, profiles)

    return make


def test_measured_and_analytic_profiles_have_one_consumer(demo_plan, cost_of, sampled):
    """A profile with a roofline's figures prices a plan as the roofline does."""
    analytic, measured = (price_plan(demo_plan, model) for model in (cost_of(), cost_of(sampled())))
    assert measured.iteration_time_s == pytest.approx(analytic.iteration_time_s, rel=0.05)
    for name, seconds in analytic.duration_s.items():
        assert measured.duration_s[name] == pytest.approx(seconds, rel=0.1)
    assert measured.duration_s != analytic.duration_s


def test_twice_all_seconds_are_twice_the_calls(demo_plan, cost_of, sampled):
    once, twice = (cost_of(sampled(scale)) for scale in (1.0, 2.0))
    for node in demo_plan.nodes:
        if node.kind == "call":
            seconds = once.call(node.call, node.assignment).seconds
            assert twice.call(node.call, node.assignment).seconds == pytest.approx(2 * seconds)


def test_means_over_ranks(tiny):
    def found(seconds):
        timed = Timed(operation="layer/forward", tp=1, tokens=8, context=8, seconds=seconds)
        return Measurements(operations=(timed,), process_bytes=int(seconds))

    profile = MeasuredProfile.of("cpu-slot", 1, 2, tiny, 4, [found(1.0), found(3.0), Measurements()])
    assert [o.seconds for o in profile.operations] == [2.0]
    assert profile.process_bytes == 1


def test_a_profile_of_another_model_is_refused(cost_of, sampled, llama):
    with pytest.raises(
        ProfileError, match=r"another model: it has hidden 128, layers 4, .* role 'actor' has hidden 4096"
    ):
        cost_of(sampled(), shape=llama())


def test_a_profile_of_other_precision_is_refused(cost_of, sampled):
    with pytest.raises(ProfileError, match="parameters of 4 bytes, the run's have 2"):
        cost_of(sampled(), itemsize=2)


def test_degrees_and_ranks_that_were_not_measured_are_refused(sampled):
    with pytest.raises(ProfileError, match=r"no figures for tp=8 \(it has tp=1, 2, 4\)"):
        ProfileTables(sampled(), "lm", 8, False)
    with pytest.raises(ProfileError, match=r"all_reduce among 8 ranks \(it has up to 4\)"):
        ProfileTables(sampled(), "lm", 4, False).exchange_s("all_reduce", 8, 1000, False)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_exchanges_take_time(sampled, seconds, tiny):
    exchange = TimedExchange(kind="send", ranks=2, crosses_hosts=False, size_bytes=8, seconds=seconds)
    timed = Timed(operation="layer/forward", tp=1, tokens=8, context=8, seconds=1.0)
    with pytest.raises(ValueError, match="an impossible figure"):
        MeasuredProfile.of(
            "cpu-slot", 1, 2, tiny, 4, [Measurements(operations=(timed,), exchanges=(exchange,))]
        )


def test_layers_whose_tp_groups_span_hosts_are_dearer(sampled):
    profile = sampled()
    across = tuple(
        e.model_copy(update={"crosses_hosts": True, "seconds": 10 * e.seconds}) for e in profile.exchanges
    )
    both = profile.model_copy(update={"exchanges": profile.exchanges + across})
    inside, outside = (
        ProfileTables(both, "lm", 2, crosses).layer_s("forward", 512, 32) for crosses in (False, True)
    )
    reduce_s = ProfileTables(both, "lm", 2, False).exchange_s("all_reduce", 2, 512 * 128 * 4, False)
    assert outside - inside == pytest.approx(2 * 9 * reduce_s)


def test_tp_degrees_that_were_not_measured_are_priced_by_the_device(cost_of, sampled, make_graph, assign):
    whole = sampled()
    only_one = whole.model_copy(update={"operations": tuple(o for o in whole.operations if o.tp == 1)})
    call, tp2 = make_graph().call("ref_inference"), assign([0, 1], tp=2)
    assert cost_of(only_one).call(call, tp2) == cost_of().call(call, tp2)
    assert cost_of(only_one).call(call, assign([0])) == cost_of(whole).call(call, assign([0]))


def test_transfers_are_priced_by_what_redistributions_took(cost_of, sampled):
    """The handshake of the heads is in the link's latency; what happens inside calls does not see it."""
    profile = sampled()
    slower = tuple(
        e.model_copy(update={"seconds": e.seconds + 0.5}) if e.kind == "redistribute" else e
        for e in profile.exchanges
    )
    before, after = cost_of(profile), cost_of(profile.model_copy(update={"exchanges": slower}))
    assert after.classes.wires({0}).inside_s == pytest.approx(before.classes.wires({0}).inside_s + 0.5)
    assert cost_of().classes.profiles[0] == preset("cpu-slot")
