"""What generation costs where an environment answers turn by turn (docs/adr/0021-turns.md).

Each turn is a generation of its own, whose prompt is all that is there before it: prompt, turns and observations are
read anew. Then all of a rank's sequences wait for their environments.
"""

from collections import defaultdict
from dataclasses import replace

from planner.plan.workload import Lengths, Workload
from planner.pricing.call_formulas import CallCost, OnMesh, generate
from rlhf_tasks.spec import ModelFunctionCall


def turns_of(workload: Workload) -> list[Workload]:
    """The workload of each turn: a response has equal parts in all of them."""
    turns, lengths = workload.turns, workload.new_tokens
    shares = defaultdict[int, float](float)
    for tokens, share in lengths.points:
        shares[-(-tokens // turns)] += share
    part = Lengths(points=tuple(sorted(shares.items())))
    found = list[Workload]()
    for turn in range(turns):
        context = workload.prompt_tokens + round(lengths.mean * turn / turns)
        room = max(part.longest, workload.cache_tokens - context)
        sizes = {"prompt_tokens": context, "longest_prompt": None, "new_tokens": part, "max_new_tokens": room}
        changed = {**sizes, "turns": 1}
        found.append(workload.model_copy(update=changed))
    return found


def generate_in_turns(mesh: OnMesh, call: ModelFunctionCall, micro_batches: int) -> CallCost:
    """The cost of a generation of `workload.turns` turns, each followed by `workload.environment_s` seconds.

    The samples of a group share the reading of their prompt alone: from the second turn on, each has a context of its
    own.
    """
    workload = mesh.workload
    if workload.turns == 1:
        cost = generate(mesh, call, micro_batches)
        return replace(cost, seconds=cost.seconds + workload.environment_s)
    each = mesh.share(call) * mesh.strategy.dp * call.chunks
    alone = call.model_copy(update={"group_size": 1, "n_seqs": each})
    costs = [
        generate(replace(mesh, workload=turn), alone if number else call, micro_batches)
        for number, turn in enumerate(turns_of(workload))
    ]
    seconds = sum(cost.seconds for cost in costs) + workload.turns * workload.environment_s
    stages = zip(*(cost.active_bytes for cost in costs), strict=True)
    return CallCost(seconds, tuple(map(max, stages)))
