"""Measures how good and how fast the plan search is, with one cost model in one process.

    python -m bench.planner [--seeds 10] [--modes search mcmc] [--settings 7B+7B/1x8 ...] [--limits 1 10 60]
                            [--large 70B+70B/128x8 ...] [--json FILE]

The workload is PPO with Llama-2 shapes on A100-80G nodes (NVLink 300 GB/s each way inside a node, 200 Gb/s between
nodes): 128 prompt tokens, 896 new tokens, batch 128, 4 mini-batches; ref like the actor, reward like the critic. For
each setting it reports: seconds per iteration after 1, 10 and 60 s of search and of MCMC (from the trace of one run
per seed), the lower bound, the gap, choices priced per second, and the time to the final plan. Compilation is done
before the clock starts. Every reported plan is also replayed (tests/planner/replay.py shares no code with the
simulator), and both times are compared. At the end there is one search on 1,024 GPUs and one on 16,384, under the
largest limit.

With ten seeds, everything takes an hour and a half; `--seeds 1 --limits 1 10 --large` takes five minutes. A limit is
wall-clock time, in which a busy machine does less, so CPU seconds are reported too.
"""

import time
from contextlib import suppress
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

from bench.harness import options, write
from prefect_rlhf.planner.plan.build import PlanError
from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.workload import Lengths, RoleModel, Workload
from prefect_rlhf.planner.pricing.calls import CostModel
from prefect_rlhf.planner.pricing.devices import preset
from prefect_rlhf.planner.pricing.problem import Problem
from prefect_rlhf.planner.search.search import SearchResult, find_plan
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from tests.planner.replay import replay

SHAPES = {
    "7B": ModelShape("llama", 4096, 32, 32, 32, 128, 11008, 32000, 4096),
    "13B": ModelShape("llama", 5120, 40, 40, 40, 128, 13824, 32000, 4096),
    "34B": ModelShape("llama", 8192, 48, 64, 8, 128, 22016, 32000, 4096),
    "70B": ModelShape("llama", 8192, 80, 64, 8, 128, 28672, 32000, 4096),
}
"""Of Llama-2 and Code Llama (config.json)."""

SETTINGS = {
    "7B+7B/1x8": ("7B", "7B", 1),
    "13B+7B/2x8": ("13B", "7B", 2),
    "34B+7B/4x8": ("34B", "7B", 4),
    "70B+7B/8x8": ("70B", "7B", 8),
    "70B+70B/16x8": ("70B", "70B", 16),
    "7B+34B/4x8": ("7B", "34B", 4),
}
"""Model of actor and ref, model of critic and reward, hosts of eight GPUs."""

MODES = ("search", "mcmc")

LARGE = {"70B+70B/128x8": ("70B", "70B", 128), "70B+70B/2048x8": ("70B", "70B", 2048)}
"""As SETTINGS. The batch grows with the cluster."""


def problem(actor: str, critic: str, hosts: int, n_seqs: int = 128) -> Problem:
    """PPO's planning problem for a pair of models on some hosts."""
    sizes = SimpleNamespace(
        batch_size=n_seqs,
        group_size=1,
        num_mini_batches=4,
        scoring_role="reward",
        on_reward_error="stop",
        scores_tokens=False,
        roles=lambda: ("actor", "critic", "ref", "reward"),
        records_kept=False,
        truncated_responses="keep",
    )
    ppo = algorithm("ppo")
    graph = DataflowGraph(ppo.graph(sizes), ppo.dataset_keys, name="ppo")
    models = {role: RoleModel(shape=SHAPES[actor]) for role in ("actor", "ref")}
    models |= {role: RoleModel(shape=SHAPES[critic], head="scalar") for role in ("critic", "reward")}
    workload = Workload(prompt_tokens=128, new_tokens=Lengths.fixed(896), itemsize=2, recompute="full")
    return Problem(graph, CostModel(Cluster(hosts, 8), preset("a100-80g-sxm"), models, workload))


def cost_after(result: SearchResult, seconds: float) -> float | None:
    """Seconds per iteration of the best plan after `seconds` of search; None if there was none yet."""
    found = [point.time_s for point in result.trace if point.seconds <= seconds]
    return min(found, default=None)


def replay_error(result: SearchResult, iterations: int = 40) -> float:
    """Difference between the replay's time per iteration and the reported one, as a fraction of the latter."""
    ends: dict[int, float] = {}
    for execution in replay(result.plan, result.price.duration_s, iterations, result.price.copy_s):
        ends[execution.iteration] = max(ends.get(execution.iteration, 0.0), execution.end_s)
    # Over an even number of iterations, because with two in flight the ends may alternate.
    period = (ends[iterations - 1] - ends[iterations // 2 - 1]) / (iterations // 2)
    return abs(period / result.iteration_time_s - 1)


def run(given: Problem, mode: str, limits: list[float], seed: int) -> dict[str, Any]:
    """One search, and the figures that are reported of it."""
    cpu_s = time.process_time()
    result = find_plan(given, mode, max(limits), seed)
    cpu_s = time.process_time() - cpu_s
    final = result.trace[-1].time_s
    return {
        "cost_after_s": {f"{limit:g}": cost_after(result, limit) for limit in limits},
        "iteration_time_s": result.iteration_time_s,
        "lower_bound_s": result.lower_bound_s,
        "gap": result.gap,
        "proven_optimal": result.proven_optimal,
        "proof_class": result.proof_class,
        "seconds": result.seconds,
        "cpu_s": cpu_s,
        "final_plan_after_s": next(point.seconds for point in result.trace if point.time_s == final),
        "evaluations_per_s": result.evaluations / result.seconds,
        "replay_error": replay_error(result),
    }


def measure(name: str, given: Problem, modes: list[str], seeds: int, limits: list[float]) -> dict[str, Any]:
    """Run the modes (search, MCMC) on one setting, once per seed."""
    runs = {mode: [run(given, mode, limits, seed) for seed in range(seeds)] for mode in modes}
    rules = _rules_s(given)
    best = min(one["iteration_time_s"] for of_mode in runs.values() for one in of_mode)
    for mode, found in runs.items():
        cells = [_over_best(found, f"{limit:g}", best) for limit in limits]
        print(f"{name:16} {mode:7} {' '.join(cells)}  {_range(found)}", flush=True)
    print(
        f"{name:16} rules   {', '.join(f'{mode} {time_s:.3f} s' for mode, time_s in rules.items())}",
        flush=True,
    )
    return {"best_s": best, "runs": runs, "rules_s": rules}


def _rules_s(given: Problem) -> dict[str, float]:
    """Seconds per iteration of the plans by rule, of those that exist."""
    found = {}
    for mode in ("heuristic", "symmetric", "hybrid", "disjoint", "colocated"):
        with suppress(PlanError):
            found[mode] = find_plan(given, mode, 10.0).iteration_time_s  # of which they take one, busy or not
    return found


def _over_best(runs: list[dict[str, Any]], limit: str, best: float) -> str:
    """Mean and worst excess over the best known plan, in percent."""
    costs = [one["cost_after_s"][limit] for one in runs]
    if None in costs:
        return f"{limit} s: {costs.count(None)} of {len(costs)} without a plan;"
    usual, worst = (max(100 * (cost / best - 1), 0.0) for cost in (mean(costs), max(costs)))
    return f"{limit} s: +{usual:.2f}% (worst +{worst:.2f}%);"


def _range(runs: list[dict[str, Any]]) -> str:
    def most(key: str) -> float:
        return max(one[key] for one in runs)

    def usual(key: str) -> float:
        return mean(one[key] for one in runs)

    return (
        f"best {min(one['iteration_time_s'] for one in runs):.3f} s, bound {most('lower_bound_s'):.3f} s, "
        f"gap at most {most('gap'):.2%}, proved {sum(one['proven_optimal'] for one in runs)} of {len(runs)}, "
        f"{usual('evaluations_per_s'):,.0f} choices/s, final plan after {usual('final_plan_after_s'):.1f} s, "
        f"ended after {usual('seconds'):.1f} s ({usual('cpu_s'):.1f} CPU s), "
        f"replay off by {most('replay_error'):.1e}"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--limits", type=float, nargs="+", default=[1.0, 10.0, 60.0])
    parser.add_argument("--large", nargs="*", default=list(LARGE), choices=list(LARGE))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    compiling = time.monotonic()
    for mode in MODES:
        find_plan(problem("7B", "7B", 1), mode, 1.0)
    report: dict[str, Any] = {"compile_or_load_s": time.monotonic() - compiling, "large": {}}
    report["settings"] = {
        name: measure(name, problem(*SETTINGS[name]), given.modes, given.seeds, given.limits)
        for name in given.settings
    }
    for name in given.large:
        actor, critic, hosts = LARGE[name]
        figures = run(problem(actor, critic, hosts, n_seqs=32 * hosts), "search", [max(given.limits)], 0)
        print(f"{name:16} search  {_range([figures])}", flush=True)
        report["large"][name] = figures
    write(report, given.json)


if __name__ == "__main__":
    main()
