"""Compares predictions with reality: random plans for the demo's models are priced from a measured profile, then run.

    python -m bench.reality [--plans 27] [--passes 3] [--iterations 5] [--ranks 2] [--seed 0] [--out FILE]
                            [--again FILE | --compare FILE]

Each rank has one thread on a separate core. First the profile is measured from layers and collectives only, without
running a plan, by the same executor as in `prefect-rlhf profile`. Then plans are priced and run: random feasible
plans, an equal number for each of three settings of batch and lengths, and for each setting the plans of the search
and the heuristic. A plan's figure is the mean over the iterations after WARM_UP. Every plan is run once in each pass
over all plans, and the mean of its passes counts: a shared machine has phases of seconds to minutes in which it is a
third slower, which would otherwise affect only some plans. Every response has the maximum length, so that predicted
and real work are the same.

--out writes every figure, node by node. --again prices the plans in such a file again, and runs nothing. --compare
runs only the plans of search and heuristic again, because their difference may be smaller than the spread of one
plan's passes. The machine should be idle.
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import NamedTuple

from bench.harness import RankPool, options, write
from bench.plan_runs import PlanRun, measured_profile, ppo_of, run_plan, write_models
from bench.reality_report import (
    COMPARED,
    Outcome,
    PassTime,
    Setting,
    compare,
    cost_model,
    read,
    report,
    written,
)
from planner.plan.build import build_plan
from planner.plan.graph import DataflowGraph
from planner.plan.mesh import Cluster, meshes
from planner.pricing.figures import MeasuredProfile
from planner.pricing.problem import Problem
from planner.search.search import find_plan
from rlhf_tasks.algorithms.examples import prepared_rows
from rlhf_tasks.algorithms.ppo import PPOConfig
from rlhf_tasks.algorithms.registry import algorithm
from rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from rlhf_tasks.spec import CallAssignment, ExecutionPlan

WARM_UP = 2
MICRO_BATCHES = (1, 2, 4)
SEARCH_S = 10.0


SETTINGS = (Setting(32, 16, 32), Setting(64, 32, 64), Setting(128, 16, 48))


class Candidate(NamedTuple):
    """A plan to run."""

    label: str
    setting: Setting
    plan: ExecutionPlan


def graph_of(config: PPOConfig) -> DataflowGraph:
    """PPO's dataflow graph."""
    registered = algorithm("ppo")
    return DataflowGraph(registered.graph(config), registered.dataset_keys, name="ppo")


def random_assignments(graph: DataflowGraph, cluster: Cluster, draw: Random) -> dict[str, CallAssignment]:
    """A device mesh, a strategy and micro-batches for every call, all drawn independently."""
    every = list(meshes(cluster))

    def assignment() -> CallAssignment:
        mesh = draw.choice(every)
        degrees = [
            (mesh.size // (tp * pp), tp, pp)
            for tp in range(1, mesh.size + 1)
            for pp in range(1, mesh.size // tp + 1)
            if mesh.size % (tp * pp) == 0
        ]
        strategy = ParallelStrategy(*draw.choice(degrees))
        return CallAssignment(
            placement=Placement(mesh.devices, strategy), micro_batches=draw.choice(MICRO_BATCHES)
        )

    return {call.name: assignment() for call in graph.calls}


class Reality:
    """The models, the cluster and the settings of one benchmark.

    The profile and each plan need a new pool, because the ranks of a real run have done nothing before it either.
    """

    def __init__(self, n_ranks: int, folder: Path) -> None:
        self._folder, self._runs = folder, 0
        self.cluster = Cluster(1, n_ranks)
        write_models(folder)

    def config(self, setting: Setting) -> PPOConfig:
        return ppo_of(self._folder, self.cluster.n_devices, *setting)

    def profile(self, pool: RankPool) -> MeasuredProfile:
        """Measure layers and collectives on the ranks."""
        prompt = max(s.prompt_tokens for s in SETTINGS)
        longest = max(s.prompt_tokens + s.new_tokens for s in SETTINGS)
        n_seqs = max(s.batch_size for s in SETTINGS)
        return measured_profile(pool, self._folder / "actor", n_seqs, prompt, longest)

    def run(self, pool: RankPool, candidate: Candidate, iterations: int) -> PassTime:
        """Run a plan. Returns seconds per iteration and node, after the warm-up, and each rank's peak bytes."""
        self._runs += 1
        folder = self._folder / f"run-{self._runs}"
        folder.mkdir()
        config, plan = self.config(candidate.setting), candidate.plan
        prepared_rows(config).keep(folder)
        document = config.model_dump(mode="json")
        runs = pool.run(run_plan, plan.model_dump_json(), document, str(folder), WARM_UP + iterations)
        return PassTime(seconds_per_iteration(runs), node_seconds(runs), [run.peak_bytes for run in runs])


def seconds_per_iteration(runs: Sequence[PlanRun]) -> float:
    """Mean seconds per iteration after the warm-up. An iteration ends when its last rank has ended it."""
    ends: dict[int, float] = defaultdict(float)
    for t in (t for run in runs for t in run.times):
        ends[t.iteration] = max(ends[t.iteration], t.ended_s)
    last = max(ends)
    return (ends[last] - ends[WARM_UP - 1]) / (last - WARM_UP + 1)


def node_seconds(runs: Sequence[PlanRun]) -> dict[str, float]:
    """Node -> mean seconds from the start of its last rank to the end of its last rank."""
    spans: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for t in (t for run in runs for t in run.times):
        if t.iteration >= WARM_UP:
            spans[t.node, t.iteration].append((t.started_s, t.ended_s))
    seconds = defaultdict(list)
    for (node, _), found in spans.items():
        seconds[node].append(max(end for _, end in found) - max(start for start, _ in found))
    return {node: fmean(values) for node, values in seconds.items()}


def candidates(
    arguments: argparse.Namespace,
    profile: MeasuredProfile,
    configs: Mapping[Setting, PPOConfig],
    cluster: Cluster,
) -> list[Candidate]:
    """The random plans, and the plans of search and heuristic for each setting."""
    found, settings = [], list(configs)
    for number in range(arguments.plans):
        setting = settings[number % len(settings)]
        graph = graph_of(configs[setting])
        draw = Random(f"reality/{arguments.seed}/{number}")
        plan = build_plan(graph, random_assignments(graph, cluster, draw), cluster)
        found.append(Candidate(f"random {number}", setting, plan))
    for setting in settings if arguments.search else ():
        problem = Problem(graph_of(configs[setting]), cost_model(profile, setting, configs[setting]))
        for mode in COMPARED:
            plan = find_plan(problem, mode=mode, time_limit_s=SEARCH_S, seed=arguments.seed).plan
            found.append(Candidate(mode, setting, plan))
    return found


def measure(arguments: argparse.Namespace, folder: Path) -> tuple[MeasuredProfile, list[Outcome], dict]:
    """Measure the profile and run all plans."""
    reality = Reality(arguments.ranks, folder)
    configs = {setting: reality.config(setting) for setting in SETTINGS[: arguments.plans]}
    started = time.monotonic()
    with RankPool(arguments.ranks) as pool:
        profile = reality.profile(pool)
    print(f"profile measured in {time.monotonic() - started:.0f} s", flush=True)
    outcomes = [
        Outcome(*candidate, []) for candidate in candidates(arguments, profile, configs, reality.cluster)
    ]
    run_in_passes(reality, outcomes, arguments)
    return profile, outcomes, configs


def run_in_passes(reality: Reality, outcomes: Sequence[Outcome], arguments: argparse.Namespace) -> None:
    """Run every plan once in each pass, and add the figures to its outcome."""
    for number in range(arguments.passes):
        for outcome in outcomes:
            with RankPool(arguments.ranks) as pool:
                outcome.passes.append(reality.run(pool, Candidate(*outcome[:3]), arguments.iterations))
        print(f"pass {number + 1} of {arguments.passes} has ended", flush=True)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--plans", type=int, default=27, help="random plans")
    parser.add_argument("--passes", type=int, default=3, help="passes; each runs every plan once")
    parser.add_argument("--iterations", type=int, default=5, help="timed iterations per plan and pass")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-search", dest="search", action="store_false", help="random plans only")
    parser.add_argument("--out", type=Path, help="write all figures to a JSON file")
    parser.add_argument("--again", type=Path, help="price the plans of such a file again")
    parser.add_argument(
        "--compare", type=Path, help="run the search's and heuristic's plans of such a file again"
    )
    arguments = parser.parse_args()
    if arguments.again is not None:
        report(*read(json.loads(arguments.again.read_text())["figures"]))
        return
    if arguments.compare is not None:
        _, outcomes, _ = read(json.loads(arguments.compare.read_text())["figures"])
        outcomes = [outcome._replace(passes=[]) for outcome in outcomes if outcome.label in COMPARED]
        with tempfile.TemporaryDirectory() as folder:
            run_in_passes(Reality(arguments.ranks, Path(folder)), outcomes, arguments)
        compare(outcomes)
        return
    with tempfile.TemporaryDirectory() as folder:
        profile, outcomes, configs = measure(arguments, Path(folder))
    figures = report(profile, outcomes, configs)
    write(written(profile, outcomes, configs, figures), arguments.out)


if __name__ == "__main__":
    main()
