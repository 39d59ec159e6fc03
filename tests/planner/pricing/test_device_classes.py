"""Clusters with devices of several classes: what calls, moves and memory cost there, and what search makes of it."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.planner.plan.build import PlanError, build_plan
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.pricing.calls import CostModel
from prefect_rlhf.planner.pricing.device_classes import RANGES, DeviceClassError, DeviceClasses, implausible
from prefect_rlhf.planner.pricing.devices import PRESETS, DeviceLink, DeviceProfile, preset
from prefect_rlhf.planner.pricing.options import call_options
from prefect_rlhf.planner.pricing.plans import price_plan
from prefect_rlhf.planner.pricing.problem import Problem, ProblemError
from prefect_rlhf.planner.search.baselines import heuristic_plan
from prefect_rlhf.planner.search.compiled.tables import Tables
from prefect_rlhf.planner.search.search import bound_of, find_plan
from tests.planner.sampled import ALL_FOR_TENSORS
from tests.planner.search.test_branch_and_bound import enumerated, proved

pytestmark = pytest.mark.timeout(1800)  # the first run compiles, on a starved machine for minutes

A100, H100 = preset("a100-80g-sxm"), preset("h100-sxm")
CALLS = ("actor_generate", "ref_inference", "actor_train")


def renamed(device: DeviceProfile, name: str, **changes) -> DeviceProfile:
    return device.model_copy(update={"name": name, **changes})


@pytest.fixture
def problem_on(small_problem):
    """The small problem with given devices, host by host."""

    def make(devices: list[DeviceProfile], per_host: int = 2, calls=CALLS, max_tp=2) -> Problem:
        cluster = Cluster(len(devices), per_host)
        alike = small_problem(cluster, calls, max_tp)
        classes = DeviceClasses.host_by_host(cluster, devices)
        return Problem(
            alike.graph, CostModel(cluster, classes, alike.model.models, alike.model.workload), max_tp
        )

    return make


# What stands where


def test_classes_by_numbers_of_hosts_are_those_host_by_host():
    cluster = Cluster(4, 2)
    assert DeviceClasses.by_hosts(cluster, [(2, A100), (1, H100), (1, A100)]) == DeviceClasses.host_by_host(
        cluster, [A100, A100, H100, A100]
    )
    with pytest.raises(
        DeviceClassError, match="n_hosts=4, but device classes are given for 1000000000001 hosts"
    ):
        DeviceClasses.by_hosts(cluster, [(1, A100), (10**12, H100)])  # a list of so many fits no memory


def test_runs_and_layouts_of_classes():
    classes = DeviceClasses.host_by_host(Cluster(4, 2), [A100, A100, H100, A100])
    assert [profile.name for profile in classes.profiles] == ["a100-80g-sxm", "h100-sxm"]
    assert classes.runs == ((0, 0), (4, 1), (6, 0))
    assert classes.layout(2, 4) == ((0, 0), (2, 1))
    assert classes.layout(5, 1) == ((0, 1),)
    assert classes.layout(0, 2) == classes.layout(6, 2) != classes.layout(4, 2)
    assert classes.within(0, 8) == (0, 1)
    assert [classes.profile(device).name for device in (3, 4, 7)] == [A100.name, H100.name, A100.name]
    assert str(classes) == "4x2 (hosts 0-1 a100-80g-sxm, 2 h100-sxm, 3 a100-80g-sxm)"
    assert str(DeviceClasses.alike(Cluster(4, 2), A100)) == "4x2 a100-80g-sxm"


def test_classes_that_do_not_make_up_a_cluster():
    with pytest.raises(DeviceClassError, match=r"n_hosts=3, but device classes are given for 2 hosts"):
        DeviceClasses.host_by_host(Cluster(3, 2), [A100, H100])
    smaller = A100.model_copy(update={"memory_bytes": 1})
    with pytest.raises(DeviceClassError, match="are both named 'a100-80g-sxm'"):
        DeviceClasses.host_by_host(Cluster(2, 2), [A100, smaller])


# What it costs


def test_a_mesh_of_two_classes_is_priced_by_the_slowest_operation_by_operation(make_graph, ppo_cost, assign):
    slow = renamed(
        A100, "slow", flops_per_s=A100.flops_per_s / 9, memory_bytes_per_s=A100.memory_bytes_per_s / 9
    )
    far = renamed(A100, "far", between_hosts=DeviceLink(bytes_per_s=3e9, latency_s=1e-4))
    cluster = Cluster(2, 2)

    def seconds(call, first: DeviceProfile, second: DeviceProfile) -> float:
        classes = DeviceClasses.host_by_host(cluster, [first, second])
        return ppo_cost(cluster, device=classes).call(call, assign([0, 1, 2, 3], dp=2, tp=1, pp=2)).seconds

    for call in make_graph().calls:
        assert seconds(call, A100, slow) == seconds(call, slow, slow) > seconds(call, A100, A100)
        mixed = seconds(call, slow, far)
        assert mixed > max(seconds(call, slow, slow), seconds(call, far, far)), (
            "slow arithmetic and slow links"
        )
        assert mixed == seconds(call, far, slow)


def test_the_experts_of_a_mixture_are_split_over_devices_of_one_class(make_graph, ppo_cost, llama, assign):
    """Each rank of a tp group asks a router of its own: devices that round unlike may choose unlike experts."""
    mixture = llama(
        model_type="mixtral", hidden_size=256, intermediate_size=512, num_hidden_layers=2, vocab_size=1024
    )
    cluster, graph = Cluster(3, 2), make_graph(n_seqs=16)
    classes = DeviceClasses.host_by_host(cluster, [A100, A100, H100])
    for call in graph.calls:
        model = ppo_cost(cluster, mixture, classes)
        options = [pair.resident for pair in call_options(Problem(graph, model, max_tp=4), call)]
        wide = {option.first for option in options if option.strategy.tp == 4}
        assert wide == {0}, "hosts 0 and 1 are of one class, 1 and 2 of two"
        assert any(option.size == 6 and option.strategy.tp == 2 for option in options)
        with pytest.raises(
            ValueError, match=r"tp=4 splits the experts of \w+ over devices of unlike classes"
        ):
            model.call(call, assign([2, 3, 4, 5], tp=4))
        dense = [
            pair.resident
            for pair in call_options(Problem(graph, ppo_cost(cluster, device=classes), max_tp=4), call)
        ]
        assert {option.first for option in dense if option.strategy.tp == 4} == {0, 2}


def test_a_call_on_one_class_does_not_see_the_others(make_graph, ppo_cost, assign):
    cluster = Cluster(2, 2)
    mixed = ppo_cost(cluster, device=DeviceClasses.host_by_host(cluster, [A100, H100]))
    for call in make_graph().calls:
        for devices, device in (([0, 1], A100), ([2, 3], H100)):
            alone = ppo_cost(cluster, device=device)
            assert mixed.call(call, assign(devices, tp=2)) == alone.call(call, assign(devices, tp=2))


def test_a_move_takes_the_slowest_links_of_its_classes():
    slow = renamed(
        A100, "slow", between_hosts=DeviceLink(bytes_per_s=1e9, latency_s=1e-3), link_efficiency=0.5
    )
    classes = DeviceClasses.host_by_host(Cluster(3, 2), [A100, A100, slow])
    inside, between = A100.inside_host, A100.between_hosts
    fast = (
        inside.latency_s,
        1 / (0.8 * inside.bytes_per_s),
        between.latency_s,
        1 / (0.8 * between.bytes_per_s),
    )
    assert classes.wires({0}) == pytest.approx(fast)
    assert classes.wires({1}) == pytest.approx((inside.latency_s, 1 / (0.5 * inside.bytes_per_s), 1e-3, 2e-9))
    assert classes.wires({0, 1}) == classes.wires({1})
    quick = renamed(slow, "quick", inside_host=DeviceLink(bytes_per_s=1e15, latency_s=1.0))
    mixed = DeviceClasses.host_by_host(Cluster(2, 2), [A100, quick])
    assert mixed.wires({0, 1}) == pytest.approx((1.0, fast[1], 1e-3, 2e-9)), (
        "latency of one, bandwidth of the other"
    )


def test_a_save_is_as_slow_as_the_slowest_host():
    slow = renamed(A100, "slow", host_copy_bytes_per_s=1e9)
    classes = DeviceClasses.host_by_host(Cluster(2, 2), [A100, slow])
    assert classes.host_copy_s(50e9, classes.within(0, 2)) == 2
    assert classes.host_copy_s(50e9, classes.within(0, 4)) == 50


# Memory


def test_options_fit_the_memory_of_their_own_class(problem_on):
    small = renamed(A100, "small", memory_bytes=400_000_000, **ALL_FOR_TENSORS)
    asked = problem_on([A100, small])
    options = [pair.resident for pair in call_options(asked, asked.graph.call("actor_train"))]
    alone = [o for o in options if o.size == 1]
    assert {o.first for o in alone} == {0, 1}, "one small device cannot hold the optimizer"
    assert any(o.first == 0 and o.size == 4 for o in options)


def test_a_plan_that_lacks_memory_names_the_device_and_its_class(problem_on):
    tiny = renamed(H100, "tiny", memory_bytes=10_000_000, **ALL_FOR_TENSORS)
    asked = problem_on([tiny, tiny])
    with pytest.raises(ProblemError, match=r"device \d \(tiny\) lacks \d+ of \d+ bytes"):
        find_plan(asked, "heuristic", 60.0)
    mixed = problem_on([A100, tiny])
    with pytest.raises(PlanError, match=r"Device [23] \(tiny\) lacks \d+ bytes: .* and has 10000000\."):
        heuristic_plan(mixed)


# Search


def test_two_classes_of_one_kind_are_one_class(problem_on):
    alike, twins = Tables(problem_on([A100, A100])), Tables(problem_on([A100, renamed(A100, "twin")]))
    assert twins.options == alike.options
    assert bound_of(twins) == bound_of(alike)
    one, other = (find_plan(tables.problem, "search", 600.0) for tables in (alike, twins))
    assert one.proven_optimal
    assert (other.plan, other.iteration_time_s, other.lower_bound_s) == (
        one.plan,
        one.iteration_time_s,
        one.lower_bound_s,
    )


def test_exchanging_the_classes_mirrors_the_options_and_the_optimum(problem_on):
    """Without pipelines, whose last stages hold the samples."""
    tables = [Tables(problem_on(devices)) for devices in ([A100, H100], [H100, A100])]
    for here, there in zip(*(found.options for found in tables), strict=True):
        priced = [
            {(o.first, o.strategy, o.micro_batches): (o.seconds, o.active) for o in found}
            for found in (here, there)
        ]
        for (first, strategy, count), price in priced[0].items():
            mirrored = first if strategy.size == 4 else (first + 2) % 4
            assert priced[1][mirrored, strategy, count] == price
    times = [
        min(
            found.evaluate(choice).time_s
            for choice in product(
                *([i for i, o in enumerate(options) if o.strategy.pp == 1] for options in found.options)
            )
        )
        for found in tables
    ]
    assert times[0] == pytest.approx(times[1], rel=1e-9)


@pytest.mark.parametrize(
    ("calls", "max_tp", "memory"),
    [
        (("actor_generate", "ref_inference", "actor_train"), 1, 80e9),
        (("actor_generate", "critic_inference", "critic_train"), 2, 0.6e9),
        (("actor_generate", "actor_train"), 2, 0.4e9),
    ],
)
def test_search_equals_enumeration_on_two_classes(problem_on, calls, max_tp, memory):
    devices = [H100, renamed(A100, "small", memory_bytes=int(memory), **ALL_FOR_TENSORS)]
    tables = Tables(problem_on(devices, calls=calls, max_tp=max_tp))
    state, lower_bound_s = proved(tables)
    best = enumerated(tables)
    assert bound_of(tables) <= best
    assert state.excess_bytes == 0
    assert state.time_s == pytest.approx(best, rel=1e-9)
    assert lower_bound_s == pytest.approx(best, rel=2e-9)


SLOWER = {
    "flops_per_s": lambda device, factor: device.flops_per_s / factor,
    "memory_bytes_per_s": lambda device, factor: device.memory_bytes_per_s / factor,
    "host_copy_bytes_per_s": lambda device, factor: device.host_copy_bytes_per_s / factor,
    "link_efficiency": lambda device, factor: device.link_efficiency / factor,
    "decode_overhead_s": lambda device, factor: device.decode_overhead_s * factor,
    "layer_overhead_s": lambda device, factor: device.layer_overhead_s * factor,
}


def test_a_slower_class_makes_no_plan_faster(problem_on):
    tables = Tables(problem_on([A100, H100]))
    problem, model = tables.problem, tables.problem.model

    @given(
        st.tuples(*(st.sampled_from(range(len(options))) for options in tables.options)),
        st.sets(st.sampled_from(sorted(SLOWER)), min_size=1),
        st.sampled_from([1.5, 10.0]),
        st.integers(0, 1),
    )
    @settings(max_examples=40)
    def check(choice, names, factor, host) -> None:
        devices = [A100, H100]
        changes = {name: SLOWER[name](devices[host], factor) for name in names}
        devices[host] = renamed(devices[host], "slow", **changes)
        classes = DeviceClasses.host_by_host(model.cluster, devices)
        slowed = CostModel(model.cluster, classes, model.models, model.workload)
        plan = build_plan(
            problem.graph, tables.assignments(choice), problem.cluster, call_order=tables.orders[0]
        )
        before, after = (price_plan(plan, priced) for priced in (model, slowed))
        assert all(after.duration_s[node] >= before.duration_s[node] for node in before.duration_s)
        assert after.iteration_time_s >= before.iteration_time_s * (1 - 1e-12)

    check()


def test_the_optimum_is_never_better_with_a_slower_class(problem_on):
    times = [proved(Tables(problem_on(d)))[0].time_s for d in ([H100, H100], [H100, A100], [A100, A100])]
    assert times == sorted(times)
    assert times[0] < times[-1]


def with_figure(name: str, value: float):
    """An A100 with one figure changed."""
    device, (part, *inner) = preset("a100-80g-sxm"), name.split(".")
    if inner:
        value = getattr(device, part).model_copy(update={inner[0]: value})
    return device.model_copy(update={part: value})


@pytest.mark.parametrize("device", PRESETS.values(), ids=PRESETS)
def test_presets_are_plausible(device):
    assert [*implausible(device, "here")] == []


@pytest.mark.parametrize("name", ["b200", "b300", "slow host"])
def test_faster_and_slower_devices_than_the_presets_are_plausible(name):
    figures = {
        "b200": {
            "flops_per_s": 2.25e15,
            "memory_bytes_per_s": 8e12,
            "memory_bytes": 192 * 10**9,
            "inside_host": DeviceLink(bytes_per_s=9e11, latency_s=3e-6),
            "between_hosts": DeviceLink(bytes_per_s=5e10, latency_s=0),  # 8 x 400 Gb/s for a host's 8 GPUs
        },
        "b300": {
            "between_hosts": DeviceLink(bytes_per_s=9.7e10, latency_s=0)
        },  # what 800 Gb/s for each GPU reach
        "slow host": {
            "flops_per_s": 1e10,
            "memory_bytes_per_s": 2e9,
            "memory_bytes": 10**9,
            "between_hosts": DeviceLink(bytes_per_s=1.25e7, latency_s=5e-3),
        },
    }[name]
    assert [*implausible(preset("h100-sxm").model_copy(update=figures), "here")] == []


@pytest.mark.parametrize(
    ("name", "value", "unit", "meant"),
    [
        ("flops_per_s", 312, "TFLOP/s", "3.12e+14"),
        ("flops_per_s", 312_000, "GFLOP/s", "3.12e+14"),
        ("memory_bytes_per_s", 2039, "GB/s", "2.039e+12"),
        ("memory_bytes", 80, "GB", "8e+10"),
        ("memory_bytes", 81_920, "MB", "8.192e+10"),
        ("inside_host.bytes_per_s", 300, "GB/s", "3e+11"),
        ("inside_host.bytes_per_s", 2.4e12, "bits per second", "3e+11"),
        ("inside_host.latency_s", 5, "microseconds", "5e-06"),
        ("between_hosts.bytes_per_s", 25, "GB/s", "2.5e+10"),
        ("between_hosts.bytes_per_s", 200, "Gb/s", "2.5e+10"),
        ("between_hosts.bytes_per_s", 100e9, "bits per second", "1.25e+10"),
        ("between_hosts.bytes_per_s", 200e9, "bits per second", "2.5e+10"),
        ("between_hosts.bytes_per_s", 400e9, "bits per second", "5e+10"),
        ("between_hosts.latency_s", 15, "microseconds", "1.5e-05"),
        ("between_hosts.latency_s", 0.05, "milliseconds", "5e-05"),
        ("host_copy_bytes_per_s", 25, "GB/s", "2.5e+10"),
        ("decode_overhead_s", 20, "microseconds", "2e-05"),
    ],
)
def test_a_figure_in_another_unit_is_told_with_it(name, value, unit, meant):
    [sentence] = implausible(with_figure(name, value), "cluster.yaml")
    assert sentence.startswith(f"cluster.yaml: {name}={value:g} is implausible: it is in {RANGES[name].unit}")
    hint = sentence.partition("; if it is ")[2]
    assert f"in {unit}, write {meant}" in hint


def test_a_figure_in_no_known_unit_is_told_with_its_range():
    [sentence] = implausible(with_figure("flops_per_s", 1e40), "device.yaml")
    assert sentence == (
        "device.yaml: flops_per_s=1e+40 is implausible: it is in FLOP/s, and devices have 1e+09 to 1e+16."
    )
