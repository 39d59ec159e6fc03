"""Against reality: random plans for the demo's models, predicted from a measured profile and then run.

    python -m bench.reality [--plans 27] [--passes 3] [--iterations 5] [--ranks 2] [--seed 0] [--out FILE]
                            [--again FILE]

Each rank has a core of its own and one thread. First the profile is measured (as `prefect-rlhf profile` does,
by the same executor), from layers and collectives alone: no plan is run for it. Then random feasible plans, an
equal number for each of three settings of batch and lengths, and the search's and the heuristic's plan of each,
are priced and run: after WARM_UP iterations, the mean of the next ones. Every plan is run once in each pass over
all of them, and the mean of its passes counts: a shared machine has phases of seconds to minutes in which it is a
third slower, which would else meet some plans and not others. Every response has all its tokens, so that
prediction and run do the same work. --out keeps every figure, node by node; --again prices the plans in such a
file anew and runs nothing. Wants a machine that does nothing else.
"""

import argparse
import json
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from bench.demo_models import ppo_of, write_models
from bench.rank_pool import PlanRun, RankPool, measure_pieces, run_plan
from planner.calibrate import recalibrated
from planner.cost import CostModel
from planner.graph import DataflowGraph
from planner.measured import MeasuredProfile
from planner.mesh import Cluster, meshes
from planner.plan import build_plan
from planner.price import price_plan
from planner.problem import Problem
from planner.profile import preset
from planner.search import find_plan
from planner.workload import Lengths, RoleModel, Workload
from rlhf_tasks.algorithms.graphs import GRAPHS
from rlhf_tasks.config import PPOConfig
from rlhf_tasks.measurements import Grid
from rlhf_tasks.parallel.shape import ModelShape
from rlhf_tasks.parallel.topology import ParallelStrategy, Placement
from rlhf_tasks.profile_spec import ProfileSpec, pieces_of, profile_plan
from rlhf_tasks.spec import CallAssignment, ExecutionPlan

WARM_UP = 2
MICRO_BATCHES = (1, 2, 4)
SEARCH_S = 10.0
COMPARED = ("heuristic", "search")
TARGETS = {"worst": 0.28, "median": 0.10, "spearman": 0.8, "memory": 0.20}


class Setting(NamedTuple):
    """Sequences of an iteration, tokens of each prompt, and of each response."""

    batch_size: int
    prompt_tokens: int
    new_tokens: int


SETTINGS = (Setting(32, 16, 32), Setting(64, 32, 64), Setting(128, 16, 48))


class Candidate(NamedTuple):
    """A plan to run."""

    label: str
    setting: Setting
    plan: ExecutionPlan


class PassTime(NamedTuple):
    """One plan in one pass: seconds per iteration and of each node, and each rank's peak of memory."""

    seconds: float
    nodes_s: dict[str, float]
    peak_bytes: list[int]


class Outcome(NamedTuple):
    """One plan in numbers."""

    label: str
    setting: Setting
    plan: ExecutionPlan
    passes: list[PassTime]

    @property
    def measured_s(self) -> float:
        return fmean(one.seconds for one in self.passes)

    @property
    def measured_nodes_s(self) -> dict[str, float]:
        """Node -> seconds."""
        return {node: fmean(one.nodes_s[node] for one in self.passes) for node in self.passes[0].nodes_s}

    @property
    def measured_peak_bytes(self) -> list[int]:
        """Rank -> bytes, the mean of all passes."""
        return [round(fmean(peaks)) for peaks in zip(*(one.peak_bytes for one in self.passes), strict=True)]


def graph_of(config: PPOConfig) -> DataflowGraph:
    """PPO's dataflow graph."""
    registered = GRAPHS["ppo"]
    return DataflowGraph(registered.calls(config), registered.dataset_keys, name="ppo")


def cost_model(profile: MeasuredProfile, setting: Setting, config: PPOConfig) -> CostModel:
    """What the planner knows: the measured profile, and the preset's constants where it fits them."""
    models = {role: RoleModel(shape=profile.model, head=parts.head) for role, parts in config.roles().items()}
    workload = Workload(
        prompt_tokens=setting.prompt_tokens,
        new_tokens=Lengths.fixed(setting.new_tokens),
        max_new_tokens=setting.new_tokens,
        epochs=config.num_ppo_epochs,
        itemsize=profile.itemsize,
        recompute=False,
    )
    device = recalibrated(preset("cpu-slot"), profile)
    cluster = Cluster(profile.n_hosts, profile.devices_per_host)
    return CostModel(cluster, device, models, workload, [profile])


def random_assignments(graph: DataflowGraph, cluster: Cluster, draw: Random) -> dict[str, CallAssignment]:
    """A device mesh, a strategy and micro-batches for every call, each drawn on its own."""
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
    """The models, the cluster and the settings of one bench.

    The profile and each pass want a pool of their own, for the ranks of a run have done nothing before it either.
    """

    def __init__(self, n_ranks: int, folder: Path) -> None:
        self._folder, self._runs = folder, 0
        self.cluster = Cluster(1, n_ranks)
        write_models(folder)

    def config(self, setting: Setting) -> PPOConfig:
        return ppo_of(self._folder, self.cluster.n_devices, *setting)

    def profile(self, pool: RankPool) -> MeasuredProfile:
        """Measure layers and collectives on the ranks."""
        n_ranks, actor = pool.n_ranks, str(self._folder / "actor")
        shape = ModelShape.from_folder(actor)
        grid = Grid.around(
            max(s.batch_size for s in SETTINGS),
            max(s.prompt_tokens for s in SETTINGS),
            max(s.prompt_tokens + s.new_tokens for s in SETTINGS),
            shape.context,
        )
        pieces = pieces_of({actor: grid}, n_ranks, n_ranks)
        spec = ProfileSpec(dtype="float32", devices_per_host=n_ranks, pieces=pieces)
        plan = profile_plan(pieces, n_ranks, n_ranks)
        per_rank = pool.run(
            measure_pieces, plan.model_dump_json(), spec.model_dump(mode="json"), str(self._folder)
        )
        measured = [piece for pieces, _ in per_rank for piece in pieces]
        dispatch_s = max(seconds for _, seconds in per_rank)
        return MeasuredProfile.of("cpu-slot", 1, n_ranks, shape, 4, measured, dispatch_s)

    def run(self, pool: RankPool, candidate: Candidate, iterations: int) -> PassTime:
        """Run a plan; its seconds per iteration after the warm-up."""
        self._runs += 1
        folder = self._folder / f"run-{self._runs}"
        folder.mkdir()
        document, plan = self.config(candidate.setting).model_dump(mode="json"), candidate.plan
        runs = pool.run(run_plan, plan.model_dump_json(), document, str(folder), WARM_UP + iterations)
        return PassTime(seconds_per_iteration(runs), node_seconds(runs), [run.peak_bytes for run in runs])


def seconds_per_iteration(runs: Sequence[PlanRun]) -> float:
    """From the end of the warm-up to the end of the last iteration, on whichever rank ends last."""
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


def report(
    profile: MeasuredProfile, outcomes: Sequence[Outcome], configs: Mapping[Setting, PPOConfig]
) -> dict:
    """Print every plan's prediction beside its measurement, then the summary, which is returned."""
    rows, memory = [], []
    columns = {
        "setting": 14,
        "predicted s": 13,
        "measured s": 12,
        "passes": 16,
        "difference": 12,
        "memory": 9,
    }
    print(f"{'plan':26}" + "".join(f"{name:>{width}}" for name, width in columns.items()))
    for outcome in outcomes:
        model = cost_model(profile, outcome.setting, configs[outcome.setting])
        price = price_plan(outcome.plan, model)
        peaks = [
            (price.peaks[rank].total_bytes if rank in price.peaks else 0.0)
            + model.classes.profile(rank).process_bytes
            for rank in range(outcome.plan.n_devices)
        ]
        off = price.iteration_time_s / outcome.measured_s - 1
        off_memory = max(
            (p / m - 1 for p, m in zip(peaks, outcome.measured_peak_bytes, strict=True)), key=abs
        )
        rows.append((outcome.label, price.iteration_time_s, outcome.measured_s, off))
        memory.append(abs(off_memory))
        print(
            f"{outcome.label:26}{'x'.join(map(str, outcome.setting)):>14}{price.iteration_time_s:13.3f}"
            f"{outcome.measured_s:12.3f}{pass_range(outcome):>16}{off:12.1%}{off_memory:9.1%}"
        )
    random = [row for row in rows if row[0].startswith("random")]
    figures = {
        "worst": max(abs(off) for *_, off in random),
        "median": median(abs(off) for *_, off in random),
        "spearman": spearman([p for _, p, _, _ in random], [m for _, _, m, _ in random]),
        "memory": max(memory),
    }
    for name, value in figures.items():
        print(
            f"{name:10}{value:8.3f}   target {'at least' if name == 'spearman' else 'at most'} {TARGETS[name]}"
        )
    for setting in configs:  # settings differ in their work, which ranks plans across them by itself
        alike = [row for row, outcome in zip(random, outcomes, strict=False) if outcome.setting == setting]
        within = spearman([p for _, p, _, _ in alike], [m for _, _, m, _ in alike])
        print(f"spearman among the plans of {setting}: {within:.3f}")
    for setting in configs:
        of_mode = {o.label: o.passes for o in outcomes if o.setting == setting and o.label in COMPARED}
        if of_mode:
            rule, found = ([one.seconds for one in of_mode[mode]] for mode in COMPARED)
            ratios = [a / b for a, b in zip(found, rule, strict=True)]
            print(
                f"{setting}: search's plan {median(found):.3f} s, the heuristic's {median(rule):.3f} s, ratio "
                f"{median(found) / median(rule):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            )
    spreads = [stdev(one.seconds for one in o.passes) / o.measured_s for o in outcomes if len(o.passes) > 1]
    if spreads:
        print(f"standard deviation of a plan's passes, median over the plans: {median(spreads):.1%}")
    return figures


def pass_range(outcome: Outcome) -> str:
    """The quickest and the slowest pass."""
    seconds = [one.seconds for one in outcome.passes]
    return f"{min(seconds):.3f} to {max(seconds):.3f}"


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation; 1 for the same order. No ties are expected; with fewer than 3 values it says nothing."""

    def ranks(values: Sequence[float]) -> list[int]:
        order = sorted(range(len(values)), key=values.__getitem__)
        return [order.index(i) for i in range(len(values))]

    n = len(a)
    if n < 3:
        return float("nan")
    squares = sum((x - y) ** 2 for x, y in zip(ranks(a), ranks(b), strict=True))
    return 1 - 6 * squares / (n * (n * n - 1))


def candidates(
    arguments: argparse.Namespace,
    profile: MeasuredProfile,
    configs: Mapping[Setting, PPOConfig],
    cluster: Cluster,
) -> list[Candidate]:
    """The random plans, and the compared ones of each setting."""
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
    for number in range(arguments.passes):
        with RankPool(arguments.ranks) as pool:
            for outcome in outcomes:
                outcome.passes.append(reality.run(pool, Candidate(*outcome[:3]), arguments.iterations))
        print(f"pass {number + 1} ended after {time.monotonic() - started:.0f} s", flush=True)
    return profile, outcomes, configs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", type=int, default=27, help="random plans")
    parser.add_argument("--passes", type=int, default=3, help="in each of which every plan is run once")
    parser.add_argument("--iterations", type=int, default=5, help="that are timed for each plan in each pass")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-search", dest="search", action="store_false", help="random plans only")
    parser.add_argument("--out", type=Path, help="keep all figures in a JSON file")
    parser.add_argument("--again", type=Path, help="price the plans of such a file anew")
    arguments = parser.parse_args()
    if arguments.again is not None:
        report(*read(json.loads(arguments.again.read_text())))
        return
    with tempfile.TemporaryDirectory() as folder:
        profile, outcomes, configs = measure(arguments, Path(folder))
    figures = report(profile, outcomes, configs)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(written(profile, outcomes, configs, figures)))


def written(
    profile: MeasuredProfile, outcomes: Sequence[Outcome], configs: Mapping[Setting, PPOConfig], figures: dict
) -> dict[str, Any]:
    """All figures as a JSON document; `read` is its inverse."""
    return {
        "machine": {"platform": platform.platform(), "date": time.strftime("%F")},
        "figures": figures,
        "profile": profile.model_dump(mode="json"),
        "configs": [[setting, config.model_dump(mode="json")] for setting, config in configs.items()],
        "outcomes": [
            {
                **outcome._asdict(),
                "plan": outcome.plan.model_dump(mode="json"),
                "passes": [one._asdict() for one in outcome.passes],
            }
            for outcome in outcomes
        ],
    }


def read(document: Mapping[str, Any]) -> tuple[MeasuredProfile, list[Outcome], dict[Setting, PPOConfig]]:
    """Profile, outcomes and configurations of a document that `written` made."""
    outcomes = [
        Outcome(
            **{
                **outcome,
                "setting": Setting(*outcome["setting"]),
                "plan": ExecutionPlan.model_validate(outcome["plan"]),
                "passes": [PassTime(**one) for one in outcome["passes"]],
            }
        )
        for outcome in document["outcomes"]
    ]
    configs = {Setting(*setting): PPOConfig.model_validate(config) for setting, config in document["configs"]}
    return MeasuredProfile.model_validate(document["profile"]), outcomes, configs


if __name__ == "__main__":
    main()
