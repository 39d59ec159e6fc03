"""The compiled price of a choice against the plan that is built from it and its replay."""

from functools import cache
from operator import gt
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.workload import EvaluationWork, Lengths, RoleModel, Workload
from prefect_rlhf.planner.pricing.calls import CostModel
from prefect_rlhf.planner.pricing.device_classes import DeviceClasses
from prefect_rlhf.planner.pricing.devices import DeviceLink, DeviceProfile, preset
from prefect_rlhf.planner.pricing.options import LONG_TOKENS
from prefect_rlhf.planner.pricing.plans import PlanPrice, price_plan
from prefect_rlhf.planner.pricing.problem import Problem
from prefect_rlhf.planner.search.compiled.tables import Tables
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm, in_parts
from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import Lora
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from tests.planner.ahead import drawn_ahead_by
from tests.planner.random_problems import scarce_problem
from tests.planner.replay import replay
from tests.planner.sampled import ALL_FOR_TENSORS

pytestmark = pytest.mark.timeout(1800)  # the first run compiles, on a starved machine for minutes

SMALL = ModelShape.from_config(
    {
        "model_type": "llama",
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 1024,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
    }
)
LORA = Lora(8, 16.0, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))


EVALUATION = EvaluationWork(
    every=2,
    rows=45,
    rows_at_once=20,
    answers=2,
    prompt_tokens=64,
    new_tokens=128,
    completion_tokens=90,
)


def make_tables(
    cluster: Cluster,
    name: str = "ppo",
    n_seqs: int = 16,
    memory_bytes: int = 80 * 10**9,
    slower: float = 1.0,
    last_host: DeviceProfile | None = None,
    host_copy_bytes_per_s: float = 25e9,
    evaluation: EvaluationWork | None = None,
    lora: Lora | None = None,
    chunks: int = 1,
    sync_every: int | None = None,
    max_rounds: int = 1,
    staleness: int = 0,
    host_memory_bytes: int | None = None,
    prompt_tokens: int = 32,
) -> Tables:
    """Tables of an algorithm whose roles all have the same small model, on A100s; on the last host other devices.

    lora        of the roles that train; then actor and ref, critic and reward begin from the same weights
    chunks      parts into which calls are cut
    sync_every  iterations from one blend of the reference with the actor to the next
    max_rounds  of GRPO: rounds in which the samples of an iteration come
    staleness   iterations by which they are drawn ahead
    """
    sizes = {
        "batch_size": n_seqs,
        "num_mini_batches": 2,
        "scoring_role": "reward",
        "on_reward_error": "stop",
        "scores_tokens": False,
        "roles": lambda: ("actor", "critic", "ref", "reward"),
        "records_kept": False,
        "group_size": 2,
        "truncated_responses": "keep",
        "max_rounds": max_rounds,
        "beta": 0.04,
        "mask_truncated_completions": False,
    }
    registered = algorithm(name)
    graph = DataflowGraph(
        in_parts(drawn_ahead_by(staleness, registered.graph(SimpleNamespace(**sizes))), chunks),
        registered.dataset_keys,
        name=name,
        evaluated=("actor",) if evaluation else (),
        on_start=evaluation is not None,
        follows={"ref": "actor"} if sync_every else {},
    )
    heads = {"actor": "lm", "ref": "lm", "critic": "scalar", "reward": "scalar"}
    models = {
        role: RoleModel(
            shape=SMALL,
            head=heads[role],
            lora=lora if graph.trainer(role) else None,
            weights=heads[role] if lora else "",
        )
        for role in graph.roles
    }
    workload = Workload(
        prompt_tokens=prompt_tokens,
        new_tokens=Lengths.fixed(32),
        itemsize=2,
        recompute="full",
        evaluation=evaluation,
        sync_every=sync_every or 1,
    )
    device = preset("a100-80g-sxm").model_copy(
        update={
            **ALL_FOR_TENSORS,
            "memory_bytes": memory_bytes + 10**9,
            "context_bytes": 10**9,
            "host_copy_bytes_per_s": host_copy_bytes_per_s,
            "host_memory_bytes": host_memory_bytes,
        }
    )
    device = slow_down(device, slower)
    devices = [device] * (cluster.n_hosts - 1) + [last_host or device]
    classes = DeviceClasses.host_by_host(cluster, devices)
    return Tables(Problem(graph, CostModel(cluster, classes, models, workload)))


def slow_down(device: DeviceProfile, factor: float) -> DeviceProfile:
    """A device on which everything takes `factor` times as long."""
    rates = ("flops_per_s", "memory_bytes_per_s", "host_copy_bytes_per_s")
    times = ("layer_overhead_s", "decode_overhead_s", "optimizer_overhead_s", "dispatch_s")
    changes: dict = {name: getattr(device, name) / factor for name in rates}
    changes |= {name: getattr(device, name) * factor for name in times}
    for name in ("inside_host", "between_hosts"):
        link = getattr(device, name)
        changes[name] = DeviceLink(bytes_per_s=link.bytes_per_s / factor, latency_s=link.latency_s * factor)
    return device.model_copy(update=changes)


@cache
def tables_of(name: str) -> Tables:
    """Roomy clusters, one with shares that mini-batches do not divide, one with small devices, a rollout, and
    evaluations that take a good part of the time and of a small device's memory."""
    return {
        "1x8": lambda: make_tables(Cluster(1, 8)),
        "2x2": lambda: make_tables(Cluster(2, 2)),
        "2x4, 12 sequences": lambda: make_tables(Cluster(2, 4), n_seqs=12),
        "2x2, little memory": lambda: make_tables(Cluster(2, 2), memory_bytes=230 * 10**6),
        "3x2, two classes": lambda: make_tables(Cluster(3, 2), last_host=preset("h200-sxm")),
        "2x2, two classes, little memory": lambda: make_tables(
            Cluster(2, 2),
            memory_bytes=10**9,
            last_host=preset("h100-sxm").model_copy(update={"memory_bytes": 150 * 10**6, **ALL_FOR_TENSORS}),
        ),
        "2x2, slow host links": lambda: make_tables(
            Cluster(2, 2), memory_bytes=230 * 10**6, host_copy_bytes_per_s=1e8
        ),
        "4x2, little memory of hosts": lambda: make_tables(
            Cluster(4, 2), memory_bytes=230 * 10**6, host_memory_bytes=100 * 10**6
        ),
        "3x4, two classes, little memory of hosts": lambda: make_tables(
            Cluster(3, 4),
            n_seqs=24,
            memory_bytes=230 * 10**6,
            host_memory_bytes=60 * 10**6,
            last_host=preset("h200-sxm").model_copy(update={"host_memory_bytes": 20 * 10**6}),
        ),
        "1x4, tokens divided": lambda: make_tables(Cluster(1, 4), n_seqs=8, prompt_tokens=LONG_TOKENS),
        "2x4, tokens divided, parts": lambda: make_tables(
            Cluster(2, 4), n_seqs=8, memory_bytes=900 * 10**6, prompt_tokens=LONG_TOKENS, chunks=2
        ),
        "2x2, adapters": lambda: make_tables(Cluster(2, 2), lora=LORA),
        "2x2, adapters, little memory": lambda: make_tables(
            Cluster(2, 2), lora=LORA, memory_bytes=45 * 10**6
        ),
        "2x2, parts": lambda: make_tables(Cluster(2, 2), chunks=2),
        "2x4, parts of which dp does not divide one": lambda: make_tables(Cluster(2, 4), n_seqs=24, chunks=2),
        "2x2, parts, little memory": lambda: make_tables(
            Cluster(2, 2), memory_bytes=230 * 10**6, host_copy_bytes_per_s=1e8, chunks=4
        ),
        "2x2, parts, reference follows": lambda: make_tables(Cluster(2, 2), chunks=2, sync_every=3),
        "2x2, rounds": lambda: make_tables(Cluster(2, 2), "grpo", max_rounds=2),
        "2x2, rounds, little memory": lambda: make_tables(
            Cluster(2, 2), "grpo", n_seqs=8, memory_bytes=230 * 10**6, max_rounds=3
        ),
        "2x2, drawn 1 ahead": lambda: make_tables(Cluster(2, 2), "grpo", staleness=1),
        "2x2, parts drawn 1 ahead": lambda: make_tables(Cluster(2, 2), "grpo", chunks=2, staleness=1),
        "2x2, drawn 2 ahead, little memory": lambda: make_tables(
            Cluster(2, 2), "grpo", memory_bytes=230 * 10**6, staleness=2
        ),
        "rollout": lambda: make_tables(Cluster(2, 2), "rollout"),
        "2x2, evaluated": lambda: make_tables(Cluster(2, 2), memory_bytes=230 * 10**6, evaluation=EVALUATION),
        "3x2, two classes, reference follows": lambda: make_tables(
            Cluster(3, 2), last_host=preset("h200-sxm"), sync_every=3
        ),
        "2x2, little memory, reference follows": lambda: make_tables(
            Cluster(2, 2), memory_bytes=230 * 10**6, sync_every=1
        ),
        "2x2, adapters, evaluated": lambda: make_tables(
            Cluster(2, 2), lora=LORA, memory_bytes=45 * 10**6, evaluation=EVALUATION
        ),
    }[name]()


NAMES = [
    *("1x8", "2x2", "2x4, 12 sequences", "2x2, little memory", "2x2, slow host links"),
    *("3x2, two classes", "2x2, two classes, little memory", "rollout", "2x2, evaluated"),
    *("1x4, tokens divided", "2x4, tokens divided, parts"),
    *("2x2, adapters", "2x2, adapters, little memory", "2x2, adapters, evaluated"),
    *("2x2, parts", "2x4, parts of which dp does not divide one", "2x2, parts, little memory"),
    *("2x2, drawn 1 ahead", "2x2, parts drawn 1 ahead", "2x2, drawn 2 ahead, little memory"),
    *("2x2, parts, reference follows", "2x2, rounds", "2x2, rounds, little memory"),
    *("3x2, two classes, reference follows", "2x2, little memory, reference follows"),
    *("4x2, little memory of hosts", "3x4, two classes, little memory of hosts"),
]


@pytest.mark.parametrize("name", ["1x4, tokens divided", "2x4, tokens divided, parts"])
def test_of_long_sequences_the_tokens_may_be_divided_but_not_to_draw_them(name):
    calls = zip(tables_of(name).problem.graph.calls, tables_of(name).options, strict=True)
    divides = {call.name: any(option.strategy.cp > 1 for option in options) for call, options in calls}
    assert divides == {name: name != "actor_generate" for name in divides}
    of_short = [option for options in tables_of("1x8").options for option in options]
    assert all(option.strategy.cp == 1 for option in of_short)


def test_where_memory_may_lack_frozen_roles_and_train_steps_may_be_offloaded():
    trained = {"actor_train", "critic_train"}
    for name, offloadable in (
        ("1x8", set()),
        ("2x2, slow host links", {"ref_inference", "reward_inference", *trained}),
        ("2x2, little memory, reference follows", {"reward_inference", *trained}),
    ):
        found = tables_of(name)
        options = dict(zip(found.calls, found.options, strict=True))
        assert {call for call, own in options.items() if any(o.offload for o in own)} == offloadable
        for call in offloadable:
            half = len(options[call]) // 2
            twins = zip(options[call][:half], options[call][half:], strict=True)
            for a, b in twins:
                assert b.offload
                if call in trained:
                    assert b == a or (b.seconds > a.seconds and min(map(gt, b.host, a.host)))
                    assert b._replace(**{name: getattr(a, name) for name in CHANGED}) == a
                else:
                    assert b.host == a.copy
                    assert b._replace(offload=False, onloaded=False, frozen=a.frozen, host=a.host) == a
                assert b.onloaded


CHANGED = ("seconds", "resident", "host", "offload", "onloaded")
"""What differs where a train_step is offloaded."""


def draw_choice(data: st.DataObject, tables: Tables) -> list[int]:
    """An option for each call, often placed as the first call is."""
    choice: list[int] = []
    for options in tables.options:
        like = [i for i, o in enumerate(options) if choice and _alike(o, tables.options[0][choice[0]])]
        anything = st.integers(0, len(options) - 1)
        choice.append(data.draw(st.one_of(anything, st.sampled_from(like)) if like else anything))
    return choice


def _alike(a, b) -> bool:
    return (a.first, a.strategy) == (b.first, b.strategy)


def lacking(price: PlanPrice, classes: DeviceClasses) -> float:
    """Bytes that the device or host lacks which lacks most."""
    missing = (peak.total_bytes - classes.room_bytes(device) for device, peak in price.peaks.items())
    on_hosts = (sum(parts.values()) - classes.host_room_bytes(host) for host, parts in price.hosts.items())
    return max(0.0, *missing, *on_hosts)


@pytest.mark.parametrize("name", NAMES)
@given(st.data())
@settings(max_examples=8)
def test_a_choice_costs_what_its_plan_costs(name, data):
    """Under the order that was found best, which is the best of all orders."""
    found = tables_of(name)
    assert_costs_what_its_plan_costs(found, draw_choice(data, found))


@pytest.mark.parametrize("number", [79, 83, 85])
@given(st.data())
@settings(max_examples=6)
def test_so_does_a_choice_with_sharded_weights(number, data):
    """Of every call that has such options: of roles that train, their copies, and frozen ones."""
    found = Tables(scarce_problem(number))
    choice = [
        data.draw(
            st.sampled_from(
                [i for i, o in enumerate(own) if o.strategy.shard == "parameters"] or range(len(own))
            )
        )
        for own in found.options
    ]
    assert_costs_what_its_plan_costs(found, choice)


def assert_costs_what_its_plan_costs(found: Tables, choice: list[int]) -> None:
    classes = found.problem.model.classes
    value = found.evaluate(choice)
    prices = [price_plan(found.plan_in(choice, n), found.problem.model) for n in range(len(found.orders))]
    times = [(lacking(price, classes), price.iteration_time_s) for price in prices]
    assert value.excess_bytes == pytest.approx(times[value.order][0], rel=1e-9)
    assert value.time_s == pytest.approx(times[value.order][1], rel=1e-9)
    least = min(excess for excess, _ in times)
    assert value.excess_bytes == pytest.approx(least, rel=1e-9)
    fitting = [time_s for excess, time_s in times if excess <= least * (1 + 1e-9)]
    assert value.time_s == pytest.approx(min(fitting), rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
@given(st.data())
@settings(max_examples=6)
def test_the_replay_settles_at_the_time_and_no_device_works_longer(name, data):
    found = tables_of(name)
    choice = draw_choice(data, found)
    time_s, plan = found.evaluate(choice).time_s, found.plan(choice)
    price = price_plan(plan, found.problem.model)
    seconds = price.duration_s
    for device in range(plan.n_devices):
        assert time_s >= sum(seconds[node.name] for node in plan.on(device)) * (1 - 1e-9)
    ends = [0.0] * 61
    for run in replay(plan, seconds, 61, price.copy_s):
        ends[run.iteration] = max(ends[run.iteration], run.end_s)
    # Periods of up to 4 iterations divide the span
    assert (ends[60] - ends[36]) / 24 == pytest.approx(time_s, rel=1e-6)


@given(st.data())
@settings(max_examples=20)
def test_mirrored_hosts_cost_the_same(data):
    """Hosts are alike: exchanging the two of them changes nothing where no mesh spans both."""
    found = tables_of("2x2")
    choice, mirrored = [], []
    for options in found.options:
        twins = {
            (o.first, o.size, o.strategy, o.micro_batches): i for i, o in enumerate(options) if o.size <= 2
        }
        first, *alike = data.draw(st.sampled_from(sorted(twins, key=str)))
        choice.append(twins[first, *alike])
        mirrored.append(twins[(first + 2) % 4, *alike])
    assert found.evaluate(mirrored)[:2] == pytest.approx(found.evaluate(choice)[:2], rel=1e-9)


@cache
def slower_tables(factor: float) -> Tables:
    return make_tables(Cluster(2, 2), slower=factor)


@given(st.data(), st.sampled_from([0.5, 4.0]))
@settings(max_examples=15)
def test_scaling_all_times_scales_the_result(data, scale):
    plain, scaled = tables_of("2x2"), slower_tables(scale)
    choice = draw_choice(data, plain)
    assert scaled.evaluate(choice).time_s == pytest.approx(scale * plain.evaluate(choice).time_s, rel=1e-9)
