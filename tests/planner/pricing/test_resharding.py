"""What moves take: by hand, and beside the lists of messages that the executors run."""

from collections import defaultdict
from statistics import median

import numpy as np
import pytest

from prefect_rlhf.planner.plan.mesh import Cluster, meshes
from prefect_rlhf.planner.pricing.resharding import Heads, HeldModel, Wires, reallocation, redistribution
from prefect_rlhf.planner.pricing.rooflines import sizes
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.transfers import plan_reallocation, plan_redistribution, shares
from prefect_rlhf.rlhf_tasks.spec import DataSide

WIRES = Wires(inside_s=1.0, inside_byte_s=1e-2, between_s=7.0, between_byte_s=1e-1)


def moved(source: tuple[int, ...], destination: tuple[int, ...], layers: int = 4, per_host: int = 4):
    """(seconds, bytes) between (first, dp, tp, pp); a whole layer has 800 bytes."""
    held, wanted = (HeldModel(*side, 800 / side[2]) for side in (source, destination))
    return reallocation(layers, held, wanted, per_host, WIRES)


def test_a_model_that_comes_from_another_host_takes_the_slower_link():
    assert moved((0, 1, 1, 1), (1, 1, 1, 1)) == pytest.approx((1 + 3200e-2, 3200))
    assert moved((0, 1, 1, 1), (4, 1, 1, 1)) == pytest.approx((7 + 3200e-1, 3200))


def test_senders_share_what_all_receivers_lack():
    """Two devices send three models more than they have; each of the four receivers takes at most one."""
    assert moved((0, 2, 1, 1), (4, 4, 1, 1)) == pytest.approx((7 + 2 * 3200e-1, 4 * 3200))
    assert moved((0, 4, 1, 1), (4, 2, 1, 1)) == pytest.approx((7 + 3200e-1, 2 * 3200))


def test_what_a_device_has_already_stays():
    """From two stages to two slices: a device keeps a quarter of the model and lacks another one."""
    seconds, sent = moved((0, 1, 1, 2), (0, 1, 2, 1))
    assert (seconds, sent) == pytest.approx((2 * 1 + 800e-2, 2 * 800))
    # From halves to quarters: the devices in the middle have none of the slice that they are to have.
    seconds, sent = moved((0, 2, 2, 1), (0, 1, 4, 1))
    assert (seconds, sent) == pytest.approx((1 + 800e-2, 2 * 800))


def test_layers_that_the_host_has_come_from_there():
    """The source's second stage is on the other host: its half of the model crosses."""
    seconds, sent = moved((0, 1, 4, 2), (0, 1, 1, 1))
    assert sent == pytest.approx(1600 + 1600 - 2 * 200)
    assert seconds == pytest.approx(4 * 2 * 7 + 1600e-1 + 1200e-2)


def test_nothing_moves_between_equal_placements():
    for side in ((0, 2, 2, 2), (4, 1, 3, 5), (8, 1, 8, 1)):
        assert moved(side, side, layers=7) == (0.0, 0.0)
        assert moved(side, (side[0] + 16, *side[1:]), layers=7)[0] > 0


def dealt(source: tuple[int, int, int], destination: tuple[int, int, int], per_host: int = 4):
    return redistribution(Heads(*source), Heads(*destination), 960.0, per_host, WIRES)


def test_samples_take_what_the_side_with_fewer_heads_sends_or_receives():
    assert dealt((0, 1, 1), (1, 1, 1)) == pytest.approx((1 + 9.6, 960))
    assert dealt((0, 1, 1), (4, 1, 1)) == pytest.approx((7 + 96, 960))
    assert dealt((0, 1, 2), (2, 1, 1)) == pytest.approx((2 + 9.6, 960))
    assert dealt((0, 1, 2), (4, 1, 4)) == pytest.approx((2 * 7 + 48, 960))


def test_a_single_head_keeps_what_it_has():
    assert dealt((0, 1, 1), (0, 1, 2)) == pytest.approx((1 + 4.8, 480))
    assert dealt((0, 1, 4), (3, 1, 1)) == pytest.approx((3 + 7.2, 720))
    assert dealt((1, 2, 1), (1, 2, 1)) == (0.0, 0.0)


# Beside the executors' lists


def busiest_s(messages) -> float:
    """Seconds of the busiest direction of any device, hosts of 4; a message is (source, destination, bytes)."""
    busy: dict[tuple[int, str], float] = defaultdict(float)
    for source, destination, size_bytes in messages:
        crosses = source // 4 != destination // 4
        seconds = WIRES.between_byte_s if crosses else WIRES.inside_byte_s
        busy[source, "out"] += seconds * size_bytes
        busy[destination, "in"] += seconds * size_bytes
    return max(busy.values(), default=0.0)


FREE = WIRES._replace(inside_s=0.0, between_s=0.0)  # on links without latency


def pairs(llama, n: int):
    """(model, source, destination), often on the same devices."""
    random, cluster = np.random.default_rng(0), Cluster(3, 4)
    shapes = [
        llama(num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=kv, vocab_size=1001)
        for layers, kv in ((5, 8), (8, 2), (6, 4))
    ]
    where = list(meshes(cluster))
    for _ in range(n):
        shape, first = shapes[random.integers(len(shapes))], where[random.integers(len(where))]
        second = first if random.random() < 0.4 else where[random.integers(len(where))]
        yield shape, *(_placed(mesh, shape.layers, random) for mesh in (first, second))


def _placed(mesh, layers: int, random) -> Placement:
    degrees = [
        (mesh.size // (tp * pp), tp, pp)
        for tp in (1, 2, 4)
        for pp in range(1, layers + 1)
        if mesh.size % (tp * pp) == 0
    ]
    return Placement(mesh.devices, ParallelStrategy(*degrees[random.integers(len(degrees))]))


def test_reallocations_take_about_what_their_lists_take(llama):
    ratios, sent = [], []
    for shape, *placements in pairs(llama, 400):
        per_layer = [
            sizes(shape, "scalar", p.strategy.tp).stage_parameters(1, 0) * 2 / shape.layers
            for p in placements
        ]
        sides = [
            HeldModel(p.devices[0], p.strategy.dp, p.strategy.tp, p.strategy.pp, size_bytes)
            for p, size_bytes in zip(placements, per_layer, strict=True)
        ]
        seconds, size_bytes = reallocation(shape.layers, *sides, 4, FREE)
        planned = plan_reallocation(*(Layout(shape, "scalar", p) for p in placements), 2, 4)
        listed = busiest_s((t.source, t.destination, t.size_bytes) for t in planned)
        if placements[0] == placements[1]:
            assert seconds == listed == 0
        elif listed > 0:
            ratios.append(seconds / listed)
            sent.append(size_bytes / sum(t.size_bytes for t in planned))
    assert len(ratios) > 200
    assert median(ratios) == pytest.approx(1, abs=0.03)
    near = [0.8 < ratio < 1.25 for ratio in ratios]
    assert sum(near) > 0.9 * len(near)
    assert max(ratios) < 1.5
    assert median(sent) == pytest.approx(1, abs=0.02)


def test_redistributions_take_about_what_their_lists_take(llama):
    ratios = []
    for _, *placements in pairs(llama, 300):
        sides = [DataSide(placement=p) for p in placements]
        planned = plan_redistribution(*(shares(side, range(48)) for side in sides), 4, "a key")
        listed = busiest_s((t.source, t.destination, len(t.ids) * 20.0) for t in planned)
        heads = [Heads(p.heads[0], p.strategy.tp, p.strategy.dp) for p in placements]
        seconds = redistribution(*heads, 960.0, 4, FREE)[0]
        if listed > 0:
            ratios.append(seconds / listed)
    assert len(ratios) > 100
    assert median(ratios) == pytest.approx(1, abs=0.01)
    near = [0.8 < ratio < 1.25 for ratio in ratios]
    assert sum(near) > 0.8 * len(near)
