"""Graphs whose generation runs ahead of training."""

from collections.abc import Sequence
from types import SimpleNamespace

from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.pricing.problem import Problem
from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import from_older_versions
from prefect_rlhf.rlhf_tasks.spec import ModelFunctionCall

SAMPLE_AND_LEARN = ("actor_generate", "reward_inference", "actor_train")


def drawn_ahead_by(staleness: int, calls: Sequence[ModelFunctionCall]) -> list[ModelFunctionCall]:
    """The calls with generation so many iterations ahead, and the correction for it."""
    config = SimpleNamespace(
        staleness=staleness,
        learns_from_older=staleness > 0,
        infers_proximal=staleness > 0,
        sampling=SimpleNamespace(segment_tokens=None),
    )
    return from_older_versions(calls, config)  # pyright: ignore[reportArgumentType]


def problem_ahead_by(staleness: int, problem: Problem) -> Problem:
    """The same problem with such a graph."""
    graph = problem.graph
    calls = drawn_ahead_by(staleness, graph.calls)
    return Problem(DataflowGraph(calls, graph.dataset_keys, name="ahead"), problem.model)
