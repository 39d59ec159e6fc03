"""The planner chooses what a call's dp ranks get equal shares of."""

from math import inf

import pytest

from planner.plan.mesh import Cluster
from planner.plan.workload import Lengths
from planner.pricing.devices import preset
from planner.pricing.problem import Deadline, Problem
from planner.search.balance import balanced, expected, expected_s
from planner.search.baselines import heuristic_plan, priced_plan
from planner.search.compiled.tables import assignments_of
from planner.search.search import find_plan
from rlhf_tasks.spec import CallNode

pytestmark = pytest.mark.timeout(1800)  # the first to evaluate plans compiles that
WIDE = Lengths(points=((16, 0.75), (2000, 0.25)))


@pytest.fixture
def problem_of(make_graph, ppo_cost):
    """problem_of(prompts): a 7B model's SFT or PPO on four A100s with prompts of these lengths."""

    def make(
        prompts: Lengths | None, name: str = "sft", n_seqs: int = 32, link: float = 300e9, **sizes
    ) -> Problem:
        device = preset("a100-80g-sxm")
        inside = device.inside_host.model_copy(update={"bytes_per_s": link})
        lengths = {"prompt_tokens": round(prompts.mean) if prompts else 512, "prompt_lengths": prompts}
        model = ppo_cost(
            Cluster(1, 4),
            device=device.model_copy(update={"inside_host": inside}),
            new_tokens=Lengths.fixed(16),
            **lengths,
        )
        return Problem(make_graph(name, n_seqs=n_seqs, mini_batches=1, **sizes), model)

    return make


def on_two(problem: Problem, assign, **changes):
    """All calls on two devices, or as changed, by dp; priced."""
    places = {call.name: changes.get(call.name, assign([0, 1], dp=2)) for call in problem.graph.calls}
    return priced_plan(problem.graph, problem.model, places)


def chosen(priced) -> dict[str, str]:
    return {name: given.balance for name, given in assignments_of(priced.plan).items()}


def test_wide_lengths_are_dealt_by_tokens_and_equal_ones_by_count(problem_of, assign):
    wide, equal = problem_of(WIDE), problem_of(None)
    assert chosen(balanced(on_two(wide, assign), wide)) == {"actor_train": "tokens"}
    assert chosen(balanced(on_two(equal, assign), equal)) == {"actor_train": "count"}


def test_nothing_else_of_the_plan_changes(problem_of, assign):
    problem = problem_of(WIDE)
    before = on_two(problem, assign)
    after = balanced(before, problem)
    kept = {n: g.model_copy(update={"balance": "count"}) for n, g in assignments_of(after.plan).items()}
    assert kept == assignments_of(before.plan)


def test_one_rank_has_nothing_to_balance_and_generation_cannot_be(problem_of, assign):
    problem = problem_of(WIDE, "ppo")
    places = dict.fromkeys((call.name for call in problem.graph.calls), assign([0], dp=1))
    alone = priced_plan(problem.graph, problem.model, places)
    assert set(chosen(balanced(alone, problem)).values()) == {"count"}
    spread = balanced(on_two(problem, assign), problem)
    assert chosen(spread)["actor_generate"] == "count"
    assert chosen(spread)["actor_train"] == "tokens"


def test_a_call_that_gains_less_than_its_transfers_cost_deals_by_count(problem_of, assign):
    """The reward model reads what generation leaves on the same ranks, until its samples are dealt otherwise."""
    for bytes_per_s, balance in ((100e9, "tokens"), (1e5, "count")):
        problem = problem_of(WIDE, "rollout", scoring_role="reward", link=bytes_per_s)
        given = on_two(problem, assign)
        assert not [node for node in given.plan.nodes if node.kind == "transfer"]
        assert chosen(balanced(given, problem))["reward_inference"] == balance


def test_the_search_and_the_rules_choose_it_and_a_plan_by_hand_keeps_its_own(problem_of, assign):
    problem = problem_of(WIDE)
    for mode in ("search", "heuristic"):
        result = find_plan(problem, mode, 5.0)
        trains = result.plan.node("actor_train")
        assert isinstance(trains, CallNode)
        assert trains.assignment.balance == ("tokens" if trains.placement.strategy.dp > 1 else "count")
        assert result.lower_bound_s <= result.iteration_time_s
    by_hand = {"actor_train": assign([0, 1, 2, 3], dp=2, tp=2)}
    result = find_plan(problem, "manual", 5.0, evaluate=by_hand)
    assert assignments_of(result.plan) == by_hand


def test_the_choice_is_the_best_of_all_for_the_expected_lengths(problem_of, assign):
    """Against all ways of dealing the calls of PPO."""
    problem = problem_of(WIDE, "ppo", scoring_role="reward")
    given = on_two(problem, assign)
    places = assignments_of(given.plan)
    uneven = {
        call.name: found
        for call in problem.graph.calls
        if (found := expected(call, places[call.name], problem)) is not None
    }
    best = float("inf")
    for number in range(1 << len(uneven)):
        by_tokens = {
            name: places[name].model_copy(update={"balance": "tokens"})
            for place, name in enumerate(uneven)
            if number >> place & 1
        }
        plan = priced_plan(problem.graph, problem.model, places | by_tokens)
        best = min(best, expected_s(plan, uneven, problem))
    assert expected_s(balanced(given, problem), uneven, problem) <= best * 1.005


def test_after_the_deadline_no_further_choice_is_tried(problem_of, assign, monkeypatch):
    problem = problem_of(WIDE, "ppo", scoring_role="reward")
    given, made = on_two(problem, assign), list[object]()

    def counted(*arguments):
        made.append(arguments)
        return priced_plan(*arguments)

    monkeypatch.setattr("planner.search.balance.priced_plan", counted)
    assert balanced(given, problem, Deadline(inf, lambda: True)) is not None
    assert len(made) <= 1


def test_rules_without_a_spread_are_as_they_were(problem_of):
    problem = problem_of(None, "ppo", scoring_role="reward")
    given = heuristic_plan(problem.graph, problem.model)
    assert balanced(given, problem) is given
