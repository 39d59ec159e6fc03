"""The compiled prices of moves equal those of the executors' lists."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.plan.mesh import Cluster, meshes
from planner.plan.workload import Lengths, Workload
from planner.pricing.calls import CostModel
from planner.pricing.device_classes import DeviceClasses
from planner.pricing.devices import Link, preset
from planner.pricing.plans import send
from planner.search.compiled.resharding_pieces import parts
from planner.search.compiled.resharding_seconds import links, reallocation_s, redistribution_s
from rlhf_tasks.parallel.layout.shape import Lora, ModelShape
from rlhf_tasks.parallel.layout.slices import Layout
from rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from rlhf_tasks.parallel.layout.transfers import plan_reallocation, plan_redistribution, shares
from rlhf_tasks.spec import DataSide

pytestmark = pytest.mark.timeout(1800)  # the first run compiles, on a starved machine for minutes

DEVICE = preset("a100-80g-sxm")
OTHER = DEVICE.model_copy(
    update={
        "name": "other",
        "inside_host": Link(bytes_per_s=90e9, latency_s=2e-6),
        "between_hosts": Link(bytes_per_s=40e9, latency_s=40e-6),
        "link_efficiency": 0.5,
    }
)
CLUSTERS = [Cluster(1, 8), Cluster(2, 2), Cluster(2, 6), Cluster(3, 4)]
LAYERS = 5


def shape(heads: int, kv_heads: int, tied: bool) -> ModelShape:
    """A small model whose columns and vocabulary no tp divides."""
    return ModelShape.from_config(
        {
            "model_type": "llama",
            "hidden_size": 96,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 16,
            "intermediate_size": 50,
            "vocab_size": 101,
            "max_position_embeddings": 64,
            "tie_word_embeddings": tied,
            "attention_bias": heads == 6,
        }
    )


SHAPES = [shape(6, 3, False), shape(8, 2, True), shape(8, 8, False), shape(6, 1, True)]


def strategies(size: int, heads: int) -> list[ParallelStrategy]:
    return [
        ParallelStrategy(size // (tp * pp), tp, pp)
        for tp in range(1, min(size, heads) + 1)
        for pp in range(1, LAYERS + 1)
        if size % (tp * pp) == 0
    ]


def send_s(messages, classes: DeviceClasses) -> float:
    workload = Workload(prompt_tokens=1, new_tokens=Lengths.fixed(1), itemsize=2, recompute=True)
    return send(messages, CostModel(classes.cluster, classes, {}, workload))[0]


@st.composite
def pairs(draw):
    """A cluster of one class of devices or two, a model, and two placements, often on the same devices."""
    cluster, model = draw(st.sampled_from(CLUSTERS)), draw(st.sampled_from(SHAPES))
    where = list(meshes(cluster))
    first = draw(st.sampled_from(where))
    second = draw(st.one_of(st.just(first), st.sampled_from(where)))
    devices = [draw(st.sampled_from([DEVICE, OTHER])) for _ in range(cluster.n_hosts)]
    return (
        DeviceClasses.host_by_host(cluster, devices),
        model,
        *(
            Placement(mesh.devices, draw(st.sampled_from(strategies(mesh.size, model.query_heads))))
            for mesh in (first, second)
        ),
    )


def side(placement: Placement) -> np.ndarray:
    s = placement.strategy
    return np.array([placement.devices[0], s.dp, s.tp, s.pp])


ADAPTERS = [None, Lora(2, 4.0, ("q_proj", "v_proj", "down_proj"))]


@given(pairs(), st.sampled_from(["lm", "scalar"]), st.sampled_from(ADAPTERS))
@settings(max_examples=200)
def test_reallocations_cost_what_their_lists_cost(pair, head, lora):
    classes, model, source, destination = pair
    layouts = (Layout(model, head, placement, lora) for placement in (source, destination))
    planned = plan_reallocation(*layouts, 2, classes.cluster.devices_per_host)
    expected = send_s([(t.source, t.destination, t.size_bytes) for t in planned], classes)
    found = reallocation_s(parts(model, head, 2, lora), side(source), side(destination), links(classes))
    assert found == pytest.approx(expected, rel=1e-9)
    assert (found == 0) == (not planned)


@given(pairs(), st.integers(12, 40), st.sampled_from([1, 2, 3]), st.sampled_from([1, 3]), st.integers(1, 3))
@settings(max_examples=150)
def test_redistributions_cost_what_their_lists_cost(pair, n_groups, blocks_a, blocks_b, size):
    classes, _, source, destination = pair
    sides = (
        DataSide(placement=placement, mini_batches=blocks, group_size=size)
        for placement, blocks in ((source, blocks_a), (destination, blocks_b))
    )
    held, wanted = (shares(side, range(n_groups * size)) for side in sides)
    planned = plan_redistribution(held, wanted, classes.cluster.devices_per_host)
    expected = send_s([(t.source, t.destination, len(t.ids) * 1000.0) for t in planned], classes)
    heads = (
        np.array([placement.heads[0], placement.strategy.tp, placement.strategy.dp, blocks])
        for placement, blocks in ((source, blocks_a), (destination, blocks_b))
    )
    found = redistribution_s(*heads, n_groups, size * 1000.0, links(classes))
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("source", [Placement(tuple(range(4)), s) for s in strategies(4, 8)], ids=str)
def test_a_reallocation_is_free_only_to_where_it_comes_from(source):
    model, wires = parts(SHAPES[1], "lm", 2), links(DeviceClasses.alike(Cluster(2, 4), DEVICE))
    assert reallocation_s(model, side(source), side(source), wires) == 0
    moved = Placement(tuple(range(4, 8)), source.strategy)
    assert reallocation_s(model, side(source), side(moved), wires) > 0
