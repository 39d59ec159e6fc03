"""The choice of `balance`: whether a call's dp ranks get equal numbers of groups, or of tokens.

It is made after the placements. The cost model prices sequences of the mean length, for which both choices cost the
same. So the search ignores the choice, and its bounds hold for either. Dealing by tokens relieves the fullest dp rank
(`Imbalance`). It costs transfers to and from calls that deal otherwise.
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefect_rlhf.planner.plan.steady_state import steady_state
from prefect_rlhf.planner.plan.workload import Lengths
from prefect_rlhf.planner.pricing.plans import shortfall
from prefect_rlhf.planner.pricing.problem import NO_DEADLINE, Deadline, Problem
from prefect_rlhf.planner.search.baselines import Priced, priced_plan
from prefect_rlhf.planner.search.compiled.tables import assignments_of
from prefect_rlhf.rlhf_tasks.parallel.layout.transfers import partition
from prefect_rlhf.rlhf_tasks.spec import CallAssignment, ModelFunctionCall

DRAWS, MOST_DRAWN = 32, 1 << 15
"""Batches that are drawn at most, and sequences of all of them together."""


Points = tuple[tuple[int, float], ...]


class Imbalance(NamedTuple):
    """Tokens of the fullest dp rank, divided by the mean over the dp ranks: 1 where all have the same.

    by_count   where groups are dealt by their number
    by_tokens  where they are dealt by their tokens
    """

    by_count: float
    by_tokens: float


def imbalance(prompts: Lengths, answers: Lengths, n_groups: int, group_size: int, dp: int) -> Imbalance:
    """The expected imbalance of a (mini-)batch, for both ways of dealing it: the mean over batches that are drawn and
    dealt as a run deals them (docs/architecture.md, "who holds which sample").

    prompts, answers  distributions of the tokens of a prompt, and of an answer to it
    n_groups          groups of a mini-batch; each has one prompt and `group_size` answers
    The draws are the same in every process. Of a mini-batch of more than MOST_DRAWN sequences, MOST_DRAWN are drawn:
    the fullest rank's excess over its share falls with the root of the number of its groups.
    """
    drawn = min(n_groups, dp * max(1, MOST_DRAWN // (dp * group_size)))
    found = _drawn_imbalance(prompts.points, answers.points, drawn, group_size, dp)
    return Imbalance(*(1 + (of - 1) * math.sqrt(drawn / n_groups) for of in found))


@cache
def _drawn_imbalance(prompts: Points, answers: Points, n_groups: int, group_size: int, dp: int) -> Imbalance:
    draw, n_seqs = np.random.default_rng(0), n_groups * group_size
    heaviest = np.zeros(2)
    draws = min(DRAWS, max(1, MOST_DRAWN // n_seqs))
    for _ in range(draws):
        tokens = np.repeat(_drawn(prompts, n_groups, draw), group_size) + _drawn(answers, n_seqs, draw)
        lengths = {sample: int(n) for sample, n in enumerate(tokens)}
        for place, balance in enumerate(("count", "tokens")):
            shares = partition(range(n_seqs), dp, balance, lengths=lengths, group_size=group_size)
            fullest = max(sum(lengths[sample] for sample in share) for share in shares)
            heaviest[place] += fullest * dp / tokens.sum()
    return Imbalance(*(heaviest / draws).tolist())


def _drawn(lengths: Points, n: int, draw: np.random.Generator) -> NDArray[np.int64]:
    """n lengths."""
    tokens, shares = zip(*lengths, strict=True)
    return draw.choice(np.array(tokens), n, p=np.array(shares) / sum(shares))


WORTH = 0.005
"""The share of an iteration's expected time that dealing by tokens must save: less is within the noise of a draw."""


def balanced(priced: Priced, problem: Problem, deadline: Deadline = NO_DEADLINE) -> Priced:
    """The plan, with `balance: tokens` for the calls where that is expected to make the iteration faster, by the
    workload's lengths. After the deadline, no further choice is tried.

    Generation always deals by count: the lengths of its answers are not known yet. The price is still that of
    sequences of the mean length, now with the transfers that the choice costs.
    """
    given = assignments_of(priced.plan)
    uneven = {
        call.name: found
        for call in problem.graph.calls
        if (found := expected(call, given[call.name], problem)) is not None
        and found.by_count > found.by_tokens * (1 + WORTH)
    }
    if not uneven:
        return priced

    plans = {frozenset[str](): priced}
    fits = not shortfall(priced.price, problem.model)

    def seconds_of(names: frozenset[str]) -> float:
        """Of the plan in which these calls deal by tokens; infinite if the given plan fits memory and this one does
        not."""
        if names not in plans:
            changes = {name: given[name].model_copy(update={"balance": "tokens"}) for name in names}
            plans[names] = priced_plan(problem.graph, problem.model, given | changes)
        if fits and shortfall(plans[names].price, problem.model):
            return math.inf
        return expected_s(plans[names], uneven, problem)

    def is_faster(names: frozenset[str], others: frozenset[str]) -> bool:
        return seconds_of(names) < seconds_of(others) * (1 - WORTH)

    none, every = frozenset[str](), frozenset(uneven)
    chosen = every if is_faster(every, none) else none
    while not deadline.is_past():
        other = min((chosen ^ {name} for name in uneven), key=seconds_of)
        if not is_faster(other, chosen):
            break
        chosen = other
    return plans[chosen]


def expected(call: ModelFunctionCall, given: CallAssignment, problem: Problem) -> Imbalance | None:
    """The expected imbalance of a call under an assignment; None where nothing can be balanced."""
    dp, workload = given.placement.strategy.dp, problem.model.workload
    if dp == 1 or call.kind == "generate" or not call.runs_model:
        return None
    prompts = workload.prompt_lengths or Lengths.fixed(workload.prompt_tokens)
    groups = call.n_groups // call.blocks
    return imbalance(prompts, workload.new_tokens, groups, call.group_size, dp)


def expected_s(priced: Priced, uneven: Mapping[str, Imbalance], problem: Problem) -> float:
    """Seconds per iteration of a plan where each uneven call takes as long as its fullest dp rank."""
    seconds, dispatch_s = dict(priced.price.duration_s), problem.model.classes.dispatch_s
    for name, given in assignments_of(priced.plan).items():
        if name in uneven:
            fullest = uneven[name].by_tokens if given.balance == "tokens" else uneven[name].by_count
            for node in priced.plan.calls[name]:
                seconds[node.name] = dispatch_s + (seconds[node.name] - dispatch_s) * fullest
    return steady_state(priced.plan, seconds, priced.price.copy_s).iteration_time_s
