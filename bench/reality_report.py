"""The report of `bench.reality`: predictions and measurements, and the file that stores them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import NamedTuple

import numpy as np
from pydantic import TypeAdapter

from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.workload import Lengths, RoleModel, Workload
from prefect_rlhf.planner.pricing.analytic import recalibrated
from prefect_rlhf.planner.pricing.calls import CostModel
from prefect_rlhf.planner.pricing.devices import preset
from prefect_rlhf.planner.pricing.figures import MeasuredProfile
from prefect_rlhf.planner.pricing.plans import price_plan
from prefect_rlhf.rlhf_tasks.algorithms.ppo import PPOConfig
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan

COMPARED = ("heuristic", "search")
TARGETS = {"worst": 0.28, "median": 0.10, "spearman": 0.8, "memory": 0.20}


class Setting(NamedTuple):
    """Sequences of an iteration, tokens of each prompt, and tokens of each response."""

    batch_size: int
    prompt_tokens: int
    new_tokens: int


class PassTime(NamedTuple):
    """One plan in one pass: seconds per iteration, seconds of each node, and each rank's peak bytes of memory."""

    seconds: float
    nodes_s: dict[str, float]
    peak_bytes: list[int]


class Outcome(NamedTuple):
    """One plan with its measurements."""

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


@dataclass
class Figures:
    """All figures of a bench, as they stand in its file."""

    profile: MeasuredProfile
    configs: list[tuple[Setting, PPOConfig]]
    outcomes: list[Outcome]
    summary: dict[str, float]


FIGURES = TypeAdapter(Figures)


def cost_model(profile: MeasuredProfile, setting: Setting, config: PPOConfig) -> CostModel:
    """The planner's cost model: from the measured profile, with the preset's constants recalibrated by it."""
    models = {role: RoleModel(shape=profile.model, head=parts.head) for role, parts in config.roles().items()}
    workload = Workload(
        prompt_tokens=setting.prompt_tokens,
        new_tokens=Lengths.fixed(setting.new_tokens),
        max_new_tokens=setting.new_tokens,
        epochs=config.num_ppo_epochs,
        itemsize=profile.itemsize,
        recompute="none",
    )
    device = recalibrated(preset("cpu-slot"), profile)
    cluster = Cluster(profile.n_hosts, profile.devices_per_host)
    return CostModel(cluster, device, models, workload, [profile])


def report(figures: Figures) -> dict[str, float]:
    """Print every plan's predicted and measured figures, then a summary. Returns the summary."""
    profile, configs, outcomes = figures.profile, dict(figures.configs), figures.outcomes
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
            (
                p / m - 1
                for p, m in zip(peaks, outcome.measured_peak_bytes, strict=True)
                if m  # a rank that no call is on runs nothing
            ),
            key=abs,
        )
        rows.append((outcome.label, price.iteration_time_s, outcome.measured_s, off))
        memory.append(abs(off_memory))
        print(
            f"{outcome.label:26}{'x'.join(map(str, outcome.setting)):>14}{price.iteration_time_s:13.3f}"
            f"{outcome.measured_s:12.3f}{pass_range(outcome):>16}{off:12.1%}{off_memory:9.1%}"
        )
    random = [row for row in rows if row[0].startswith("random")]
    summary = {
        "worst": max(abs(off) for *_, off in random),
        "median": median(abs(off) for *_, off in random),
        "spearman": spearman([p for _, p, _, _ in random], [m for _, _, m, _ in random]),
        "memory": max(memory),
    }
    for name, value in summary.items():
        print(
            f"{name:10}{value:8.3f}   target {'at least' if name == 'spearman' else 'at most'} {TARGETS[name]}"
        )
    for setting in configs:  # across settings, the different amounts of work alone would give a correlation
        alike = [row for row, outcome in zip(random, outcomes, strict=False) if outcome.setting == setting]
        within = spearman([p for _, p, _, _ in alike], [m for _, _, m, _ in alike])
        print(f"spearman among the plans of {setting}: {within:.3f}")
    compare(outcomes)
    return summary


def compare(outcomes: Sequence[Outcome]) -> None:
    """Print the times of the search's and the heuristic's plans, and the spread of the passes."""
    for setting in dict.fromkeys(outcome.setting for outcome in outcomes):
        of_mode = {o.label: o.passes for o in outcomes if o.setting == setting and o.label in COMPARED}
        if of_mode:
            rule, found = ([one.seconds for one in of_mode[mode]] for mode in COMPARED)
            ratios = [a / b for a, b in zip(found, rule, strict=True)]
            print(
                f"{setting}: search's plan {fmean(found):.3f} s, the heuristic's {fmean(rule):.3f} s; ratios of the "
                f"passes: {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            )
    spreads = [stdev(one.seconds for one in o.passes) / o.measured_s for o in outcomes if len(o.passes) > 1]
    if spreads:
        print(f"standard deviation of a plan's passes, median over the plans: {median(spreads):.1%}")


def pass_range(outcome: Outcome) -> str:
    """The seconds of the fastest and the slowest pass, as text."""
    seconds = [one.seconds for one in outcome.passes]
    return f"{min(seconds):.3f} to {max(seconds):.3f}"


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation, 1 for the same order; assumes no ties. NaN with fewer than 3 values."""
    if len(a) < 3:
        return math.nan
    return float(np.corrcoef(*(np.argsort(np.argsort(values)) for values in (a, b)))[0, 1])
