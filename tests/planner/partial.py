"""Random choices of options and partial choices that they complete, for the tests of bounds."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.pricing.problem import Problem
from prefect_rlhf.planner.search.bounds.relaxation import OPEN, Relaxation, moves_s, relation
from prefect_rlhf.planner.search.compiled.tables import Tables

OPTION, PLACEMENT, MESH, GROUP = range(4)
"""How many rungs above an option: what is known of a call."""


class Partial(NamedTuple):
    """A partial choice and a choice that completes it.

    rungs   of all calls, None where each has its own
    chosen  [calls] the resident rows of the choice; time_s, excess_bytes: its value
    away    [calls] bool: what the choice offloads
    bounded_s  its seconds if no optimizer were offloaded, what bounds are bounds of
    rows, meet, moves  of the partial choice, as planner.search.branch_and_bound.SearchState has them
    """

    rungs: int | None
    chosen: np.ndarray
    away: np.ndarray
    time_s: float
    excess_bytes: float
    bounded_s: float
    rows: np.ndarray
    meet: np.ndarray
    moves: np.ndarray


def raised(r: Relaxation, row: int, rungs: int) -> int:
    """The row so many rungs above an option."""
    for _ in range(rungs):
        row = r.above[row]
    return int(row)


def related(r: Relaxation, a: int, b: int) -> int:
    return relation(r.arrays.options, r.n_devices, a, b)


def partial_choices(tables: Tables, r: Relaxation, n_choices: int) -> Iterator[Partial]:
    """Of each random choice: all calls known as far, then some open, then each known as far as it likes."""
    random, starts, n = np.random.default_rng(0), r.arrays.start[:-1], r.arrays.n_calls
    for _ in range(n_choices):
        choice = np.array([random.integers(len(found)) for found in tables.options])
        time_s, excess_bytes, _ = tables.evaluate(choice.tolist())
        chosen = choice + starts
        away = (chosen >= r.arrays.offloaded) * (r.arrays.offloaded - starts)
        bounded_s = tables.evaluate((choice - away * (r.arrays.trainer == np.arange(n))).tolist()).time_s
        chosen -= away
        for without, rungs in (
            (0.0, OPTION),
            (0.0, PLACEMENT),
            (0.0, MESH),
            (0.0, GROUP),
            (0.5, 0),
            (0.2, None),
        ):
            raises = random.integers(4, size=n) if rungs is None else np.full(n, rungs)
            rows = np.array([raised(r, *pair) for pair in zip(chosen, raises, strict=True)])
            rows[random.random(n) < without] = OPEN
            meet = np.array([[related(r, a, b) for b in rows] for a in rows])
            moves = np.zeros((len(r.trainer), 4))
            for k, (a, b) in enumerate(zip(r.trainer, r.reader, strict=True)):
                if OPEN not in (rows[a], rows[b]):
                    moves_s(r, k, rows[a], rows[b], moves[k])
            alike = rungs if not without else None
            yield Partial(alike, chosen, away > 0, time_s, excess_bytes, bounded_s, rows, meet, moves)


def checked_after_training(problem: Problem, beside: Sequence[str] = ()) -> Problem:
    """The actor generates, is trained, and is looked at as trained: a copy for a reader of the same iteration.

    beside  other calls of the problem, which then run too
    """
    graph = problem.graph
    generate, train, ref = (graph.call(name) for name in ("actor_generate", "actor_train", "ref_inference"))
    made = {*graph.dataset_keys, *generate.outputs}
    others = [
        call.model_copy(update={"inputs": tuple(key for key in call.inputs if key in made)})
        for call in map(graph.call, beside)
    ]
    kept = tuple(key for key in train.inputs if key in made)
    calls = [
        generate,
        train.model_copy(update={"inputs": kept, "outputs": ("trained",)}),
        ref.model_copy(
            update={
                "name": "actor_check",
                "role": "actor",
                "inputs": (*ref.inputs, "trained"),
                "outputs": ("checked",),
                "remap": {},
            }
        ),
        *others,
    ]
    return Problem(DataflowGraph(calls, graph.dataset_keys, name="checked"), problem.model)
