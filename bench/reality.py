"""Compares predictions with reality: random plans for the demo's models are priced from a measured profile, then run.

    python -m bench.reality [--plans 27] [--passes 3] [--iterations 5] [--ranks 2] [--seed 0] [--out FILE]
                            [--again FILE]

Each rank has one thread on a separate core. First the profile is measured from layers and collectives only, without
running a plan, by the same executor as in `prefect-rlhf profile`. Then plans are priced and run: random feasible
plans, an equal number for each of three settings of batch and lengths, and for each setting the plans of the search
and the heuristic. A plan's figure is the mean over the iterations after WARM_UP. Every plan is run once in each pass
over all plans, and the mean of its passes counts: a shared machine has phases of seconds to minutes in which it is a
third slower, which would otherwise affect only some plans. Every response has the maximum length, so that predicted
and real work are the same.

--out writes every figure, node by node. --again prices the plans in such a file again, and runs nothing. The machine
should be idle.
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

from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, set_seed

from bench.harness import on_ranks, options, write
from bench.models import write_model
from bench.plan_runs import PlanRun, measure_pieces, run_plan
from bench.reality_report import COMPARED, FIGURES, Figures, Outcome, PassTime, Setting, cost_model, report
from prefect_rlhf.flows.demo import MODEL, write_jsonl
from prefect_rlhf.planner.plan.build import build_plan
from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.plan.mesh import Cluster, meshes
from prefect_rlhf.planner.pricing.figures import MeasuredProfile
from prefect_rlhf.planner.pricing.problem import Problem
from prefect_rlhf.planner.search.search import find_plan
from prefect_rlhf.rlhf_tasks.algorithms.examples import prepared_rows
from prefect_rlhf.rlhf_tasks.algorithms.ppo import PPOConfig
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import read_shape
from prefect_rlhf.rlhf_tasks.profiling.measurements import Grid, ProfileSpec, pieces_of, profile_plan
from prefect_rlhf.rlhf_tasks.spec import CallAssignment

WARM_UP = 2
MICRO_BATCHES = (1, 2, 4)
SEARCH_S = 10.0
SETTINGS = (Setting(32, 16, 32), Setting(64, 32, 64), Setting(128, 16, 48))


def write_models(folder: Path) -> None:
    """Write `actor` (language model), `reward` (scalar head), of the demo's shape, and prompts of each length.

    Their end token is outside the vocabulary, so that every response has the maximum length.
    """
    for name, kind in (("actor", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
        config = LlamaConfig(**{**MODEL, "eos_token_id": MODEL["vocab_size"], "num_labels": 1})
        set_seed(0)
        write_model(kind(config), folder / name)
    for tokens in {setting.prompt_tokens for setting in SETTINGS}:
        rows = ({"prompt": f"{i:04d}".ljust(tokens, ".")} for i in range(1024))
        write_jsonl(folder / f"prompts-{tokens}.jsonl", rows)


def config_of(folder: Path, n_ranks: int, setting: Setting) -> PPOConfig:
    """A PPO configuration for the models in a folder."""
    return PPOConfig.model_validate(
        {
            "type": "ppo",
            "dtype": "float32",
            "models": {"actor": str(folder / "actor"), "reward": str(folder / "reward")},
            "data": {"train": str(folder / f"prompts-{setting.prompt_tokens}.jsonl")},
            "output_dir": str(folder / "runs"),
            "sampling": {"max_completion_length": setting.new_tokens},
            "batch_size": setting.batch_size,
            "num_mini_batches": 2,
            "total_iterations": 1000,
            "cluster": {"devices_per_host": n_ranks},
        }
    )


def measured_profile(n_ranks: int, model: Path) -> MeasuredProfile:
    """Measure layers and collectives of a model on ranks of their own."""
    shape = read_shape(str(model))
    prompt = max(s.prompt_tokens for s in SETTINGS)
    longest = max(s.prompt_tokens + s.new_tokens for s in SETTINGS)
    grid = Grid.around(max(s.batch_size for s in SETTINGS), prompt, longest, shape.context)
    pieces = pieces_of({str(model): grid}, n_ranks, n_ranks)
    spec = ProfileSpec(dtype="float32", devices_per_host=n_ranks, pieces=pieces)
    plan = profile_plan(pieces, n_ranks, n_ranks)
    per_rank = on_ranks(n_ranks, measure_pieces, plan, spec, str(model.parent))
    measured = [piece for pieces, _ in per_rank for piece in pieces]
    dispatch_s = max(seconds for _, seconds in per_rank)
    return MeasuredProfile.of("cpu-slot", 1, n_ranks, shape, 4, measured, dispatch_s)


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


def outcomes_of(
    arguments: argparse.Namespace, profile: MeasuredProfile, configs: Mapping[Setting, PPOConfig]
) -> list[Outcome]:
    """The random plans, and the plans of search and heuristic for each setting, without measurements."""
    cluster, outcomes, settings = Cluster(1, arguments.ranks), [], list(configs)
    for number in range(arguments.plans):
        setting = settings[number % len(settings)]
        graph = graph_of(configs[setting])
        draw = Random(f"reality/{arguments.seed}/{number}")
        plan = build_plan(graph, random_assignments(graph, cluster, draw), cluster)
        outcomes.append(Outcome(f"random {number}", setting, plan, []))
    for setting in settings if arguments.search else ():
        problem = Problem(graph_of(configs[setting]), cost_model(profile, setting, configs[setting]))
        for mode in COMPARED:
            plan = find_plan(problem, mode=mode, time_limit_s=SEARCH_S, seed=arguments.seed).plan
            outcomes.append(Outcome(mode, setting, plan, []))
    return outcomes


def one_pass(outcome: Outcome, config: PPOConfig, n_ranks: int, iterations: int) -> PassTime:
    """Run a plan on new ranks, because the ranks of a real run have done nothing before it either."""
    with tempfile.TemporaryDirectory() as folder:
        prepared_rows(config).keep(Path(folder))
        document = config.model_dump(mode="json")
        runs = on_ranks(n_ranks, run_plan, outcome.plan, document, folder, WARM_UP + iterations)
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
    for (node, _), times in spans.items():
        seconds[node].append(max(end for _, end in times) - max(start for start, _ in times))
    return {node: fmean(values) for node, values in seconds.items()}


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
    arguments = parser.parse_args()
    if arguments.again is not None:
        report(FIGURES.validate_python(json.loads(arguments.again.read_text())["figures"]))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        configs = {
            setting: config_of(Path(folder), arguments.ranks, setting)
            for setting in SETTINGS[: arguments.plans]
        }
        started = time.monotonic()
        profile = measured_profile(arguments.ranks, Path(folder, "actor"))
        print(f"profile measured in {time.monotonic() - started:.0f} s", flush=True)
        outcomes = outcomes_of(arguments, profile, configs)
        for number in range(arguments.passes):
            for outcome in outcomes:
                config = configs[outcome.setting]
                outcome.passes.append(one_pass(outcome, config, arguments.ranks, arguments.iterations))
            print(f"pass {number + 1} of {arguments.passes} has ended", flush=True)
    figures = Figures(profile, list(configs.items()), outcomes, {})
    figures.summary = report(figures)
    write(FIGURES.dump_python(figures, mode="json"), arguments.out)


if __name__ == "__main__":
    main()
