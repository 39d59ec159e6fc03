"""The choice of balance, and how much more than its share the fullest dp rank is expected to get."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.workload import Lengths
from prefect_rlhf.planner.pricing.devices import preset
from prefect_rlhf.planner.pricing.problem import Deadline, Problem
from prefect_rlhf.planner.search import balance
from prefect_rlhf.planner.search.balance import balanced, expected, expected_s, imbalance
from prefect_rlhf.planner.search.baselines import heuristic_plan, priced_plan
from prefect_rlhf.planner.search.compiled.tables import assignments_of
from prefect_rlhf.planner.search.search import find_plan
from prefect_rlhf.rlhf_tasks.parallel.layout.transfers import partition
from prefect_rlhf.rlhf_tasks.spec import CallNode

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
    for bytes_per_s, dealt_by in ((100e9, "tokens"), (1e5, "count")):
        problem = problem_of(WIDE, "rollout", scoring_role="reward", link=bytes_per_s)
        given = on_two(problem, assign)
        assert not [node for node in given.plan.nodes if node.kind == "transfer"]
        assert chosen(balanced(given, problem))["reward_inference"] == dealt_by


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

    monkeypatch.setattr("prefect_rlhf.planner.search.balance.priced_plan", counted)
    assert balanced(given, problem, Deadline(inf, lambda: True)) is not None
    assert len(made) <= 1


def test_rules_without_a_spread_are_as_they_were(problem_of):
    problem = problem_of(None, "ppo", scoring_role="reward")
    given = heuristic_plan(problem)
    assert balanced(given, problem) is given


ONE = Lengths.fixed(1)
SHORT_OR_LONG = Lengths(points=((10, 0.5), (1000, 0.5)))


def test_equal_lengths_are_even_either_way_and_groups_that_dp_does_not_divide_are_not():
    assert imbalance(Lengths.fixed(7), ONE, 16, 2, 4) == (1.0, 1.0)
    assert imbalance(Lengths.fixed(7), ONE, 5, 1, 2) == pytest.approx((3 * 2 / 5, 3 * 2 / 5))


def test_two_ranks_with_one_sequence_each_have_what_chance_gives_them():
    """Lengths 9 or 99, each with probability a half: fullest / mean is 1 where both are alike, else 2 * 99 / 108."""
    points = Lengths(points=((8, 0.5), (98, 0.5)))
    wanted = (1 + 2 * 99 / 108) / 2
    by_count, by_tokens = imbalance(points, ONE, 2, 1, 2)
    assert by_count == by_tokens == pytest.approx(wanted, abs=0.16)  # 32 draws: two standard errors


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 9)), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 8),
)
def test_no_rank_has_less_than_the_mean_or_more_than_all_and_tokens_are_never_much_worse(
    points, dp, group_size, times
):
    total = sum(weight for _, weight in points)
    lengths = Lengths(points=tuple((tokens, weight / total) for tokens, weight in points))
    by_count, by_tokens = imbalance(lengths, ONE, dp * times, group_size, dp)
    assert by_tokens * (1 + 1e-12) >= 1
    assert by_tokens <= by_count * 4 / 3, "longest first is at most 4/3 - 1/(3 dp) of the best (Graham 1969)"
    assert by_count <= dp


def test_more_sequences_even_out_and_whole_groups_even_out_less():
    few, many = (imbalance(SHORT_OR_LONG, ONE, n, 1, 4).by_count for n in (8, 512))
    assert few > 1.3
    assert 1 < many < 1.1
    apart, grouped = imbalance(SHORT_OR_LONG, ONE, 64, 1, 4), imbalance(SHORT_OR_LONG, ONE, 8, 8, 4)
    assert grouped.by_count > apart.by_count
    assert apart.by_tokens < 1.06 < grouped.by_tokens


def test_of_a_million_sequences_a_part_is_drawn(monkeypatch):
    """A draw of all of them takes seconds. What is drawn says about the same of a batch that may be drawn whole."""
    drawn = list[int]()

    def counted(ids, *how, **more):
        drawn.append(len(ids))
        return partition(ids, *how, **more)

    monkeypatch.setattr(balance, "partition", counted)
    million = imbalance(SHORT_OR_LONG, ONE, 1_000_000, 1, 8)
    assert max(drawn) <= balance.MOST_DRAWN
    assert 1 <= million.by_tokens <= million.by_count < 1.01
    whole = imbalance(SHORT_OR_LONG, ONE, 16_000, 2, 8).by_count
    monkeypatch.setattr(balance, "MOST_DRAWN", 1 << 12)
    assert imbalance(SHORT_OR_LONG, ONE, 16_000, 2, 8).by_count - 1 == pytest.approx(whole - 1, rel=0.5)


def test_lengths_of_data_keep_their_mean_and_their_spread():
    data = [1, 2, 3, 4] * 10 + [1000] * 10
    made = Lengths.of(data)
    assert made.mean == pytest.approx(sum(data) / len(data), rel=0.01)
    assert made.longest == 1000
    assert Lengths.of([5]) == Lengths.fixed(5)
    assert len(Lengths.of(range(1, 10_000)).points) <= 32
    assert Lengths.of([0, 0]) == Lengths.fixed(1)
