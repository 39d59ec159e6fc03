"""What a second training placement of a role could gain: the figures of docs/adr/0039.

    python -m bench.two_train_meshes [--settings 7B+7B/1x8 ...] [--json FILE]

A role is trained by two calls in each iteration, one after the other: by PPO's actor_train on sequences of 1,024
tokens, and by a second call on as many tokens in sequences `LONGER` times as long. By brute force over all placements
that the search knows: the seconds of both on the best common placement, and on the best two placements with the moves
of the state (float32 weights and both moments) there and back. No weights are moved besides, and no call beside them
needs a device, so two placements look better here than they are.
"""

from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness import options, write
from bench.planner import SETTINGS, problem
from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.plan.workload import Lengths
from prefect_rlhf.planner.pricing.calls import CostModel
from prefect_rlhf.planner.pricing.options import call_options
from prefect_rlhf.planner.pricing.problem import Problem
from prefect_rlhf.planner.pricing.resharding import HeldModel, reallocation
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import Placement

LONGER = (1, 4, 16)
CALL = "actor_train"


class Best(NamedTuple):
    """Seconds of both calls on one placement; on two without their moves; with the moves, and these alone."""

    one_s: float
    unmoved_s: float
    two_s: float
    moves_s: float
    moved_bytes: float
    pairs: int


def longer(of: Problem, factor: int) -> Problem:
    """The same tokens in fewer, longer sequences."""
    model, work = of.model, of.model.workload
    calls = [
        call.model_copy(update={"n_seqs": call.n_seqs // factor, "mini_batches": 1})
        for call in of.graph.calls
    ]
    lengths = {
        "prompt_tokens": work.prompt_tokens * factor,
        "new_tokens": Lengths.fixed(896 * factor),
    }
    graph = DataflowGraph(calls, of.graph.dataset_keys, name=of.graph.name)
    return Problem(
        graph, CostModel(model.cluster, model.classes, model.models, work.model_copy(update=lengths))
    )


def seconds_of(of: Problem) -> dict[Placement, float]:
    """Placement -> seconds of the train call with its best number of micro-batches."""
    seconds: dict[Placement, float] = {}
    for pair in call_options(of, of.graph.call(CALL)):
        placement = pair.resident.assignment.placement
        seconds[placement] = min(seconds.get(placement, float("inf")), pair.resident.seconds)
    return seconds


def move(of: Problem, source: Placement, destination: Placement) -> tuple[float, float]:
    """(seconds, bytes) of the move of the optimizer's state."""
    model, (a, b) = of.model, (source, destination)
    layers = model.models["actor"].shape.layers

    def held(placement: Placement) -> HeldModel:
        s = placement.strategy
        layer_bytes = sum(model.state_bytes("actor", placement, True)) / layers
        return HeldModel(min(placement.devices), s.copies, s.tp, s.pp, layer_bytes, s.copies)

    wires = model.classes.wires({*model.classes_of(a), *model.classes_of(b)})
    seconds, moved = reallocation(layers, held(a), held(b), model.cluster.devices_per_host, wires)
    return seconds + model.classes.reallocation_overhead_s(layers), moved


def best(first: Problem, second: Problem) -> Best:
    """Brute force over all pairs of placements, those that cannot win left out by what they take unmoved."""
    one, other = seconds_of(first), seconds_of(second)
    one_s = min(one[place] + other[place] for place in one.keys() & other.keys())
    unmoved_s = min(one.values()) + min(other.values())
    least, moves, moved_bytes, pairs = float("inf"), 0.0, 0.0, 0
    by_other = sorted(other.items(), key=lambda item: item[1])
    for a, one_a in sorted(one.items(), key=lambda item: item[1]):
        for b, other_b in by_other:
            if one_a + other_b >= least:
                break
            if a == b:
                continue
            pairs += 1
            there, back = move(first, a, b), move(first, b, a)
            total = one_a + other_b + there[0] + back[0]
            if total < least:
                least, moves, moved_bytes = total, there[0] + back[0], there[1] + back[1]
    return Best(one_s, unmoved_s, least, moves, moved_bytes, pairs)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), help="of bench.planner")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = list[dict[str, Any]]()
    for name, factor in product(arguments.settings, LONGER):
        first = problem(*SETTINGS[name])
        of = best(first, longer(first, factor))
        rows.append({"setting": name, "longer": factor, **of._asdict()})
        print(
            f"{name}, second call {factor}x as long: one placement {of.one_s:.2f} s, two {of.two_s:.2f} s of which "
            f"moves {of.moves_s:.2f} s ({of.moved_bytes / 1e9:.0f} GB); without moves {of.unmoved_s:.2f} s; "
            f"{of.pairs} pairs",
            flush=True,
        )
    write(rows, arguments.json)


if __name__ == "__main__":
    main()
