"""Rewards in the forms that verl documents: one answer at a time, or (its batch manager) all of them."""

import asyncio
import os

RUNNING = []


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert data_source == "second/sums"
    return float(ground_truth in solution_str)


def detailed(data_source, solution_str, ground_truth, extra_info=None):
    right = ground_truth in solution_str
    return {"score": 1.0 if right else -1.0, "acc": right, "index": extra_info["index"]}


def with_arguments(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    return scale * len(solution_str)


async def loop_score(data_source, solution_str, ground_truth, extra_info, **kwargs):
    """The reward loop's form."""
    await asyncio.sleep(0.01)
    return {"score": float(extra_info["task"] == "add")}


def batched(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return [{"score": len(solution) / 10} for solution in solution_strs]


def in_which_process(data_source, solution_str, ground_truth, extra_info=None):
    return os.getpid()


async def how_many_at_once(data_source, solution_str, ground_truth, extra_info=None):
    RUNNING.append(1)
    most = len(RUNNING)
    await asyncio.sleep(0.01)
    RUNNING.pop()
    return most


def counted(data_source, solution_str, ground_truth, extra_info=None, file=""):
    """Writes down each answer that it judges."""
    with open(file, "a") as lines:
        lines.write(f"{solution_str}\n")
    return None if solution_str == "no" else len(solution_str)
