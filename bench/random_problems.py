"""Is the plan search nowhere after another mode? On small random problems, against all modes and, where the choices
are few enough, against the best of all of them.

    python -m bench.random_problems [--problems 200] [--first 0] [--limit 2]

Problem number n is the same everywhere: GRPO or PPO, with parts, rounds and staleness, on two to four devices of one
or two hosts, with fast and slow links, one role or several, ample and scarce memory. The search has the limit, each
other mode half of it, as in the comparison that `prefect-rlhf plan` prints. The bench prints a row for each kind of
problem: how often the search was after, by how much at most, how often it proved its plan, how often the limit came
before all options were priced, and its seconds. It ends with 1 if the search was after anywhere.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import NamedTuple

import numba
import numpy as np

from bench.harness import options
from planner.plan.build import PlanError
from planner.plan.graph import DataflowGraph
from planner.plan.mesh import Cluster
from planner.plan.workload import Lengths, RoleModel, Workload
from planner.pricing.calls import CostModel
from planner.pricing.devices import DeviceLink, preset
from planner.pricing.problem import Problem, ProblemError
from planner.search.compiled.evaluator import value
from planner.search.compiled.tables import Tables
from planner.search.search import find_plan
from rlhf_tasks.algorithms.registry import algorithm, in_parts
from rlhf_tasks.algorithms.shared.graphs import from_older_versions
from rlhf_tasks.parallel.layout.shape import ModelShape

OTHERS = ("mcmc", "heuristic", "symmetric", "disjoint")
MOST_CHOICES = 300_000  # a second or so of enumeration
ROUNDING = 1e-9  # relative


def random_problem(number: int) -> Problem:
    """Problem `number`. Its kind is `kind_of`."""
    draw = np.random.default_rng(number)

    def one_of(*values):
        return values[draw.integers(len(values))]

    chunks, rounds = one_of((1, 1), (2, 1), (2, 1), (4, 1), (1, 2), (1, 3))
    staleness = one_of(0, 1, 1, 2) if rounds == 1 else 0  # rounds wait for scores: they are not drawn ahead
    name = "grpo" if rounds > 1 else one_of("grpo", "grpo", "grpo", "ppo")
    mini_batches, n_seqs = one_of(1, 2), one_of(4, 8, 16)
    roles = ("actor", "critic", "ref", "reward")
    config = SimpleNamespace(
        batch_size=n_seqs,
        group_size=1,
        num_mini_batches=mini_batches,
        scoring_role=one_of("actor", "reward") if name == "grpo" else "reward",
        on_reward_error="stop",
        scores_tokens=False,
        roles=lambda: roles,
        records_kept=False,
        truncated_responses="keep",
        mask_truncated_completions=False,
        beta=one_of(0.0, 0.1),
        max_rounds=rounds,
        staleness=staleness,
        learns_from_older=staleness > 0,
        infers_proximal=mini_batches > 1,
        sampling=SimpleNamespace(segment_tokens=None),
    )
    registered = algorithm(name)
    calls = from_older_versions(registered.graph(config), config)  # pyright: ignore[reportArgumentType]
    graph = DataflowGraph(in_parts(calls, chunks), registered.dataset_keys, name=name)
    shape = ModelShape.from_config(
        {
            "model_type": "llama",
            "hidden_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 2048,
            "vocab_size": 8192,
            "max_position_embeddings": 4096,
        }
    )
    heads = {"actor": "lm", "ref": "lm", "critic": "scalar", "reward": "scalar"}
    models = {role: RoleModel(shape=shape, head=heads[role]) for role in graph.roles}  # type: ignore[arg-type]
    inside, between = one_of((300e9, 25e9), (25e9, 1.25e9), (1.25e9, 1.25e9), (1.25e9, 0.1e9), (0.1e9, 0.1e9))
    device = preset("a100-80g-sxm").model_copy(
        update={
            "inside_host": DeviceLink(bytes_per_s=inside, latency_s=5e-6),
            "between_hosts": DeviceLink(bytes_per_s=between, latency_s=15e-6),
            "dispatch_s": one_of(1e-4, 5e-3),
            "context_bytes": 0,
            "communicator_bytes": 0,
            "fragmentation": 0.0,
            "memory_bytes": int(one_of(80e9, 80e9, 1.2e9, 0.9e9)),
        }
    )
    lengths = one_of((16, 16), (128, 128), (128, 1024), (1024, 16))
    workload = Workload(
        prompt_tokens=lengths[0], new_tokens=Lengths.fixed(lengths[1]), itemsize=2, recompute="full"
    )
    cluster = one_of(Cluster(1, 2), Cluster(1, 2), Cluster(2, 1), Cluster(1, 3), Cluster(1, 4), Cluster(2, 2))
    return Problem(graph, CostModel(cluster, device, models, workload), max_tp=one_of(1, None))


def kind_of(problem: Problem) -> str:
    """The kind of a problem, for the table."""
    generate = next(call for call in problem.graph.calls if call.kind == "generate")
    rounds = max(call.rounds for call in problem.graph.calls)
    cut = f"{rounds} rounds" if rounds > 1 else f"{generate.chunks} parts" if generate.chunks > 1 else "whole"
    return f"{problem.graph.name}, {cut}, {f'staleness {generate.lead}' if generate.lead else 'in step'}"


def enumerated(tables: Tables) -> float:
    """The least seconds per iteration of all choices that fit; infinite where none does."""
    return _least(tables.arrays, np.array([*map(len, tables.options)]))


@numba.njit(error_model="numpy")
def _least(arrays, counts):
    choice, best = np.zeros(len(counts), np.int64), np.inf
    while True:
        time_s, excess_bytes, _ = value(arrays, choice, best)
        if excess_bytes <= 0 and time_s < best:
            best = time_s
        call = len(counts) - 1
        while call >= 0 and choice[call] == counts[call] - 1:
            choice[call] = 0
            call -= 1
        if call < 0:
            return best
        choice[call] += 1


class Compared(NamedTuple):
    """A search beside the other modes.

    found_s    seconds per iteration of the search's plan; infinite where it says that nothing fits
    is_proven  whether the search proved its plan
    is_late    whether the limit ended it before all options were priced: then it is compared with the modes alone
    seconds    that the search took
    best_s     the least seconds per iteration of any other mode, or of all choices; infinite where none fits
    by         who found it
    """

    kind: str
    found_s: float
    is_proven: bool
    is_late: bool
    seconds: float
    best_s: float
    by: str

    @property
    def behind(self) -> float:
        """The excess of the search's seconds over the best of the others, as a fraction; 0 if there is none."""
        excess = 0.0 if self.best_s == math.inf else self.found_s / self.best_s - 1
        return excess if excess > ROUNDING else 0.0


def compared(problem: Problem, limit_s: float) -> Compared:
    """The search and all other modes on a problem; where the choices are few, enumeration too."""
    seconds: dict[str, float] = {}
    for mode in OTHERS:
        with suppress(PlanError, ProblemError):
            seconds[mode] = find_plan(problem, mode, limit_s / 2).iteration_time_s
    searched: tuple[float, bool, bool, float] = math.inf, False, False, 0.0
    with suppress(PlanError, ProblemError):
        found = find_plan(problem, "search", limit_s)
        searched = found.iteration_time_s, found.proven_optimal, found.late, found.seconds
    with suppress(ProblemError):
        tables = Tables(problem)
        if not searched[2] and math.prod(map(len, tables.options)) <= MOST_CHOICES:
            seconds["enumeration"] = enumerated(tables)
    by = min(seconds, key=lambda mode: seconds[mode], default="")
    return Compared(kind_of(problem), *searched, seconds.get(by, math.inf), by)


def rows(every: list[Compared]) -> Iterator[str]:
    """The table: a row for each kind, then all together."""
    yield f"{'problems':40} {'number':>6} {'after':>6} {'at most':>8} {'proved':>6} {'late':>4} {'seconds':>8}"
    kinds = sorted({one.kind for one in every})
    for kind in [*kinds, "all"]:
        own = [one for one in every if kind in (one.kind, "all")]
        yield (
            f"{kind:40} {len(own):6} {sum(one.after > 0 for one in own):6} {max(one.after for one in own):8.1%} "
            f"{sum(one.is_proven for one in own):6} {sum(one.is_late for one in own):4} "
            f"{sum(one.seconds for one in own):8.1f}"
        )


def main(arguments: list[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--limit", type=float, default=2.0)
    given = parser.parse_args(arguments)
    every = list[Compared]()
    for number in range(given.first, given.first + given.problems):
        one = compared(random_problem(number), given.limit)
        every.append(one)
        if one.behind:
            print(
                f"problem {number}: {one.kind}: {one.found_s:.5g} s, {one.by} {one.best_s:.5g} s", flush=True
            )
    print("\n".join(rows(every)))
    return int(any(one.behind for one in every))


if __name__ == "__main__":
    sys.exit(main())
