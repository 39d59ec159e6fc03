"""What every mode owes its caller: a plan that fits, an honest price, a bound below it."""

import numpy as np
import pytest

from prefect_rlhf.planner.plan.build import PlanError
from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.order import call_orders
from prefect_rlhf.planner.plan.workload import Lengths, RoleModel, Workload
from prefect_rlhf.planner.pricing import problem as deadlines
from prefect_rlhf.planner.pricing.calls import CostModel
from prefect_rlhf.planner.pricing.devices import preset
from prefect_rlhf.planner.pricing.plans import price_plan
from prefect_rlhf.planner.pricing.problem import NO_DEADLINE, Problem, ProblemError
from prefect_rlhf.planner.report import proof_sentence
from prefect_rlhf.planner.search import annealing as anneal
from prefect_rlhf.planner.search import branch_and_bound as branch
from prefect_rlhf.planner.search import search
from prefect_rlhf.planner.search.baselines import side_by_side
from prefect_rlhf.planner.search.branch_and_bound import FOUND, PAUSED, proof_class
from prefect_rlhf.planner.search.compiled.tables import Tables, assignments_of, counterparts, nearest_choice
from prefect_rlhf.planner.search.search import MODES, find_plan, priced_choice
from prefect_rlhf.rlhf_tasks.algorithms.registry import in_parts
from prefect_rlhf.rlhf_tasks.spec import ModelFunctionCall
from tests.planner.ahead import drawn_ahead_by
from tests.planner.random_problems import (
    crowded_problem,
    enumerated,
    excess,
    random_problem,
    scarce_problem,
)
from tests.planner.sampled import ALL_FOR_TENSORS

pytestmark = pytest.mark.timeout(1800)  # the first run compiles, on a starved machine for minutes
TO_THE_END_S = 600.0  # a time limit that does not cut


@pytest.fixture
def problem(small_problem) -> Problem:
    return small_problem(Cluster(1, 2))


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=pytest.mark.whole) if mode == "mcmc" else mode
        for mode in MODES
        if mode not in ("manual", "disjoint")
    ],
)
def test_the_price_is_that_of_its_plan_and_above_the_bound(problem, mode):
    result = find_plan(problem, mode, time_limit_s=5.0 if mode == "mcmc" else TO_THE_END_S)
    assert result.mode == mode
    assert result.iteration_time_s == price_plan(result.plan, problem.model).iteration_time_s
    assert 0 < result.lower_bound_s <= result.iteration_time_s
    assert result.gap == pytest.approx(1 - result.lower_bound_s / result.iteration_time_s)
    assert result.trace[-1].time_s == pytest.approx(result.iteration_time_s)


@pytest.mark.parametrize("cluster", [Cluster(1, 4), Cluster(32, 2)])
def test_disjoint_roles_share_no_device(make_graph, ppo_cost, llama, cluster):
    """Of 32 hosts small meshes begin at few: four of the smallest have no room side by side, larger ones have."""
    shape = llama(hidden_size=768, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4)
    problem = Problem(make_graph(n_seqs=64), ppo_cost(cluster, shape))
    tables = Tables(problem)
    start = side_by_side(tables)
    assert start is not None
    for found in (
        assignments_of(find_plan(problem, "disjoint", TO_THE_END_S).plan),
        tables.assignments(start),
    ):
        devices = {
            role: {
                d
                for call in problem.graph.calls
                if call.role == role
                for d in found[call.name].placement.devices
            }
            for role in problem.graph.roles
        }
        assert sum(map(len, devices.values())) == len(set.union(*devices.values())) <= cluster.n_devices


def test_disjoint_needs_a_device_per_role(problem):
    with pytest.raises(PlanError, match="devices of their own"):
        find_plan(problem, "disjoint", TO_THE_END_S)
    assert side_by_side(Tables(problem)) is None


def test_a_role_whose_calls_share_no_size_of_mesh_is_planned(llama):
    """Generation needs three devices, of training's mini-batches of one sequence two can have a part."""
    calls = [
        ModelFunctionCall(
            name="generate", role="actor", kind="generate", inputs=("x",), outputs=("y",), n_seqs=512
        ),
        ModelFunctionCall(
            name="train", role="actor", kind="train_step", inputs=("y",), n_seqs=512, mini_batches=512
        ),
    ]
    shape = llama(
        hidden_size=768,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=2048,
        vocab_size=8192,
        max_position_embeddings=32768,
    )
    device = preset("a100-80g-sxm").model_copy(update={"memory_bytes": int(2.05e9), **ALL_FOR_TENSORS})
    workload = Workload(prompt_tokens=128, new_tokens=Lengths.fixed(20_000), itemsize=2, recompute="full")
    model = CostModel(Cluster(16, 1), device, {"actor": RoleModel(shape=shape)}, workload)
    problem = Problem(DataflowGraph(calls, ["x"], name="small"), model, max_tp=1)
    sizes = [{option.size for option in options} for options in Tables(problem).options]
    assert not set.intersection(*sizes), sizes
    for mode in ("search", "mcmc"):
        assert find_plan(problem, mode, 0.5).iteration_time_s > 0
    with pytest.raises(PlanError, match="The calls of actor fit no mesh of one size on a cluster of 16x1"):
        find_plan(problem, "disjoint", TO_THE_END_S)


def test_what_is_done_before_the_clock_starts_prices_nothing(problem, monkeypatch):
    priced = []

    def counted(*arguments):
        state, n_priced = anneal.descend(*arguments)
        priced.append(n_priced)
        return state, n_priced

    monkeypatch.setattr(search, "descend", counted)
    find_plan(problem, "search", TO_THE_END_S)
    assert priced[0] == 0


def test_manual_prices_what_it_is_given(problem):
    heuristic = find_plan(problem, "heuristic", TO_THE_END_S)
    given = assignments_of(heuristic.plan)
    manual = find_plan(problem, "manual", TO_THE_END_S, evaluate=given)
    assert assignments_of(manual.plan) == given
    assert manual.iteration_time_s == heuristic.iteration_time_s
    with pytest.raises(PlanError, match="give one for each call"):
        find_plan(problem, "manual", TO_THE_END_S)


@pytest.mark.parametrize("mode", ["heuristic", "symmetric"])
def test_replicas_and_micro_batches_grow_until_memory_suffices(make_graph, ppo_cost, mode):
    """Two trained and two frozen 7B models on eight A100s: one device alone cannot hold a replica."""
    problem = Problem(make_graph(n_seqs=128, mini_batches=4), ppo_cost(Cluster(1, 8)))
    result = find_plan(problem, mode, TO_THE_END_S)
    strategy = assignments_of(result.plan)["actor_train"].placement.strategy
    assert strategy.tp * strategy.pp > 1
    assert max(peak.total_bytes for peak in result.price.peaks.values()) <= 80e9


def test_micro_batches_that_grew_stay_within_the_share_of_a_larger_replica(make_graph, ppo_cost, llama):
    """Memory asks for twice the micro-batches, then for a replica of two stages, whose rule has more by itself."""
    layers = {"num_hidden_layers": 4, "hidden_size": 768, "intermediate_size": 2048}
    shape = llama(**layers, num_attention_heads=4, num_key_value_heads=4, vocab_size=8192)
    small = preset("a100-80g-sxm").model_copy(update={"memory_bytes": int(0.85e9), **ALL_FOR_TENSORS})
    model = ppo_cost(Cluster(4, 1), shape, small, new_tokens=Lengths.fixed(3000))
    found = assignments_of(
        find_plan(Problem(make_graph(n_seqs=8, mini_batches=1), model), "heuristic", TO_THE_END_S).plan
    )
    assert found["actor_train"].placement.strategy.pp > 1
    for given in found.values():
        assert given.micro_batches <= 8 // given.placement.strategy.dp


@pytest.mark.parametrize("mode", ["heuristic", "symmetric"])
def test_what_fits_nowhere_is_refused_with_device_bytes_and_field(make_graph, ppo_cost, mode):
    small = preset("a100-80g-sxm").model_copy(update={"memory_bytes": 30 * 10**9, **ALL_FOR_TENSORS})
    problem = Problem(make_graph(n_seqs=128, mini_batches=4), ppo_cost(Cluster(1, 8), device=small))
    with pytest.raises(PlanError, match=r"Device \d \(a100-80g-sxm\) lacks \d+ bytes: .* would lower it\."):
        find_plan(problem, mode, TO_THE_END_S)


def test_search_proves_its_plan_optimal_and_equal_seeds_find_equal_plans(problem):
    first, second, other = (find_plan(problem, "search", TO_THE_END_S, seed) for seed in (0, 0, 1))
    assert first.proven_optimal
    assert first.gap < 1e-8
    assert first.plan == second.plan
    assert other.iteration_time_s == pytest.approx(first.iteration_time_s, rel=1e-8)
    times = [point.time_s for point in first.trace]
    bounds = [point.lower_bound_s for point in first.trace]
    assert times == sorted(times, reverse=True)
    assert bounds == sorted(bounds)


def test_a_plan_by_rule_stands_before_the_tables_are_made(problem, monkeypatch):
    """Tables that take a minute: the trace begins earlier, with the first rule's plan and no bound."""
    now = [0.0]

    def slow_tables(problem, *limits, **which):
        now[0] += 60
        return Tables(problem)

    monkeypatch.setattr(search, "Tables", slow_tables)
    monkeypatch.setattr(search.time, "monotonic", lambda: now[0])
    first = find_plan(problem, "search", 1e-9).trace[0]
    assert (first.seconds, first.lower_bound_s) == (0.0, 0.0)
    assert first.time_s == find_plan(problem, "heuristic", TO_THE_END_S).iteration_time_s


@pytest.mark.whole
def test_no_mode_beats_a_proven_search(problem):
    best = find_plan(problem, "search", TO_THE_END_S).iteration_time_s
    for mode in ("heuristic", "symmetric", "mcmc"):
        assert find_plan(problem, mode, 0.5).iteration_time_s >= best * (1 - 1e-8)


@pytest.fixture
def far_from_one_device(make_graph, llama):
    """GRPO of one role in two parts, a version behind, on two devices with slow links. The best plan has all calls on
    one device. From both devices no change of one or two calls leads there: each move costs more than it saves."""
    sizes = {"beta": 0.0, "mask_truncated_completions": False, "max_rounds": 1, "scoring_role": "actor"}
    graph = make_graph("grpo", n_seqs=8, mini_batches=1, **sizes)
    calls = in_parts(drawn_ahead_by(1, graph.calls), 2)
    shape = llama(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=384,
        vocab_size=8192,
    )
    link = preset("a100-80g-sxm").inside_host.model_copy(update={"bytes_per_s": 1.25e9})
    device = preset("a100-80g-sxm").model_copy(update={"inside_host": link, **ALL_FOR_TENSORS})
    workload = Workload(prompt_tokens=16, new_tokens=Lengths.fixed(16), itemsize=2, recompute="full")
    model = CostModel(Cluster(1, 2), device, {"actor": RoleModel(shape=shape)}, workload)
    return Problem(DataflowGraph(calls, graph.dataset_keys, name="grpo"), model)


def test_a_plan_that_no_change_of_two_calls_leads_to_is_found_and_proved(far_from_one_device):
    found = find_plan(far_from_one_device, "search", TO_THE_END_S)
    assert found.proven_optimal
    assert found.iteration_time_s == pytest.approx(enumerated(Tables(far_from_one_device)), rel=1e-9)
    disjoint = find_plan(far_from_one_device, "disjoint", TO_THE_END_S)
    assert found.iteration_time_s <= disjoint.iteration_time_s * (1 + 1e-9)


@pytest.mark.parametrize(
    "numbers",
    [
        (2, 6, 14, 87),
        pytest.param(range(200), marks=[pytest.mark.slow, pytest.mark.timeout(7200)], id="200 of them"),
    ],
)
def test_no_mode_and_no_choice_of_random_problems_is_better_than_the_search(numbers):
    assert not [number for number in numbers if excess(random_problem(number), 3.0)]


SCARCE = (83, 104, 106, 115, 32, 34, 42, 44, 47, 50, 53, 59, 71, 72, 75, 91, 95, 98, 101, 103, 109)


@pytest.mark.parametrize(
    "numbers",
    [SCARCE[:4], pytest.param(SCARCE, marks=[pytest.mark.slow, pytest.mark.timeout(3600)], id="all")],
)
def test_where_memory_asks_for_sharded_weights_no_choice_is_better_than_the_search(numbers):
    problems = [scarce_problem(number) for number in numbers]
    for problem in problems:
        assert any(o.strategy.shard == "parameters" for own in Tables(problem).options for o in own)
        assert not excess(problem, 3.0)


CROWDED = (15, 153, 175, 0, 2, 3, 5, 6, 8, 10, 13, 14, 17, 20, 22, 29, 33, 34, 37, 38)


@pytest.mark.parametrize(
    "numbers",
    [CROWDED[:3], pytest.param(CROWDED, marks=[pytest.mark.slow, pytest.mark.timeout(3600)], id="all")],
)
def test_nor_with_sharded_weights_where_calls_fit_alone_but_not_together(numbers):
    for problem in map(crowded_problem, numbers):
        assert any(is_sharded_beside_whole(own) for own in Tables(problem).options)
        assert not excess(problem, 3.0)


@pytest.mark.parametrize("number", CROWDED[:3])
def test_roles_that_fit_alone_but_not_together_get_a_plan_with_sharded_weights(number):
    """Without them the best plans are 0.8, 0.1 and 0.2% slower."""
    chosen = assignments_of(find_plan(crowded_problem(number), "search", TO_THE_END_S).plan)
    assert any(given.placement.strategy.shard == "parameters" for given in chosen.values())


def is_sharded_beside_whole(options) -> bool:
    """Whether a call may have sharded weights under a strategy under which whole ones fit alone, all resident."""
    sharded, whole = [
        {
            (o.size, o.strategy.tp, o.strategy.cp)
            for o in options
            if o.strategy.pp == 1 and o.strategy.shard == shard and not o.offload
        }
        for shard in ("parameters", "gradients")
    ]
    return bool(sharded & whole)


@pytest.mark.parametrize(
    "numbers",
    [(5, 7, 48), pytest.param(range(80), marks=[pytest.mark.slow, pytest.mark.timeout(1800)], id="80")],
)
def test_nor_of_those_whose_tokens_may_be_divided_over_ranks(numbers):
    assert not [number for number in numbers if excess(random_problem(number, long=True), 3.0)]


@pytest.mark.parametrize(
    ("cluster", "meshes"),
    [
        (Cluster(16, 8), "calls have all meshes, strategies"),
        (
            Cluster(128, 8),
            "calls have meshes that begin and end at multiples of 8 hosts, the first 1 or 2 or 4 hosts or the same "
            "number after them, the first host and its aligned parts, strategies",
        ),
        (
            Cluster(17, 2),
            "calls have meshes that begin and end at hosts 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17, "
            "the first host and its aligned parts, strategies",
        ),
    ],
    ids=str,
)
def test_the_proof_names_its_meshes(make_graph, ppo_cost, cluster, meshes):
    assert meshes in proof_class(Problem(make_graph(), ppo_cost(cluster)))


@pytest.mark.parametrize(("n_scorers", "orders"), [(4, "one order"), (5, "one of the first 120 orders")])
def test_the_proof_names_the_cut_among_the_orders(llama, n_scorers, orders):
    """Five calls in any order have 120 orders, six have 720."""
    calls = [
        ModelFunctionCall(
            name=f"score{i}",
            role="reward",
            kind="inference",
            inputs=("input_ids",),
            outputs=(f"s{i}",),
            n_seqs=4,
        )
        for i in range(n_scorers + 1)
    ]
    model = CostModel(
        Cluster(1, 1),
        preset("a100-80g-sxm"),
        {"reward": RoleModel(shape=llama(), head="scalar")},
        Workload(prompt_tokens=8, new_tokens=Lengths.fixed(8), itemsize=2, recompute="full"),
    )
    problem = Problem(DataflowGraph(calls, {"input_ids"}, name="scores"), model)
    assert len(call_orders(problem.graph)) == 120
    assert f"calls on a device in {orders} of the graph," in proof_class(problem)


@pytest.mark.parametrize("mode", ["search", "mcmc", "heuristic"])
def test_where_options_take_longer_than_the_limit_a_plan_by_rule_is_given_without_a_bound(problem, mode):
    result = find_plan(problem, mode, time_limit_s=1e-9)
    rules = [find_plan(problem, rule, TO_THE_END_S).iteration_time_s for rule in ("heuristic", "symmetric")]
    assert result.iteration_time_s == (rules[0] if mode == "heuristic" else min(rules))
    assert (result.lower_bound_s, result.gap, result.proven_optimal) == (0.0, 1.0, False)
    sizes = {len({(o.first, o.strategy) for o in options}) for options in result.tables.options}
    assert sizes <= {1, 2, 3, 4}, "only what the rules use was priced"


def test_a_plan_without_a_search_says_so_and_disjoint_is_refused(problem):
    late = find_plan(problem, "mcmc", time_limit_s=1e-9)
    assert late.late
    assert "nothing was searched: this is the best plan by rule" in proof_sentence(late)
    in_time = find_plan(problem, "heuristic", TO_THE_END_S)
    assert not in_time.late
    assert "by rule" not in proof_sentence(in_time)
    with pytest.raises(ProblemError, match="takes longer than the time limit"):
        find_plan(problem, "disjoint", time_limit_s=1e-9)


@pytest.mark.parametrize("mode", ["search", "mcmc", "heuristic", "symmetric", "hybrid"])
def test_a_plan_without_a_search_has_no_larger_tp_than_its_problem_allows(small_problem, mode):
    """Training has two sequences at a time for four devices: without the limit, the rules take tp=2."""
    late = find_plan(small_problem(Cluster(2, 2), max_tp=1), mode, time_limit_s=1e-9)
    assert late.late
    assert "nothing was searched: this is the best plan by rule" in proof_sentence(late)
    assert {given.placement.strategy.tp for given in assignments_of(late.plan).values()} == {1}


def test_a_plan_by_hand_may_have_a_larger_tp_than_a_search(small_problem):
    problem = small_problem(Cluster(1, 2), max_tp=1)
    given = assignments_of(find_plan(small_problem(Cluster(1, 2)), "hybrid", TO_THE_END_S).plan)
    assert given["actor_generate"].placement.strategy.tp == 2
    manual = find_plan(problem, "manual", TO_THE_END_S, evaluate=given)
    assert assignments_of(manual.plan) == given
    assert not manual.proven_optimal


def tables_of_all(now: list[float], seconds: float):
    """Tables that take no time with few micro-batches, and `seconds` with all: they are late after the deadline."""

    def make(problem, deadline=NO_DEADLINE, among=(), few=False, before=None):
        now[0] += 0 if few or among else seconds
        return Tables(problem, deadline, among, few, before)

    return make


def test_plans_with_few_micro_batches_stand_before_all_options_are_priced(small_problem, monkeypatch):
    """All options take a minute of ten to price: within a second there is a plan that is better than by rule."""
    problem, now = small_problem(Cluster(2, 2)), [0.0]
    rules = [find_plan(problem, rule, TO_THE_END_S).iteration_time_s for rule in ("heuristic", "symmetric")]
    monkeypatch.setattr(search, "Tables", tables_of_all(now, 60.0))
    for module in (branch, deadlines, search.time):
        monkeypatch.setattr(module, "monotonic", lambda: now[0])
    result = find_plan(problem, "search", TO_THE_END_S)
    early = [point for point in result.trace if point.seconds < 1]
    assert min(point.time_s for point in early) < min(rules)
    assert {point.lower_bound_s for point in early} == {0.0}
    assert result.proven_optimal


@pytest.mark.whole
def test_where_all_options_take_longer_than_the_limit_a_plan_with_few_micro_batches_is_given(
    small_problem, monkeypatch
):
    problem, now = small_problem(Cluster(2, 2)), [0.0]
    rules = [find_plan(problem, rule, TO_THE_END_S).iteration_time_s for rule in ("heuristic", "symmetric")]
    monkeypatch.setattr(search, "Tables", tables_of_all(now, 60.0))
    for module in (branch, deadlines, search.time):
        monkeypatch.setattr(module, "monotonic", lambda: now[0])
    result = find_plan(problem, "search", 1.0)
    assert result.late
    assert (result.lower_bound_s, result.gap) == (0.0, 1.0)
    assert result.iteration_time_s < min(rules)
    assert result.iteration_time_s == price_plan(result.plan, problem.model).iteration_time_s
    assert "only those with few micro-batches were searched" in proof_sentence(result)


def test_what_is_chosen_with_few_micro_batches_is_no_slower_and_no_larger_among_all(small_problem):
    problem = small_problem(Cluster(2, 2), memory=1.2e9)
    few, tables = Tables(problem, few=True), Tables(problem)
    assert sum(map(len, few.options)) < sum(map(len, tables.options))
    random = np.random.default_rng(3)
    for _ in range(200):
        choice = [int(random.integers(len(options))) for options in few.options]
        taken = counterparts(few, choice, tables)
        for options, number, all_options, other in zip(
            few.options, choice, tables.options, taken, strict=True
        ):
            assert all_options[other][:3] == options[number][:3]
            assert all_options[other].offload == options[number].offload
        before, after = few.evaluate(choice), tables.evaluate(taken)
        assert after.excess_bytes <= before.excess_bytes
        assert after.time_s <= before.time_s * (1 + 1e-12)


@pytest.mark.parametrize("number", CROWDED[:3])
def test_the_few_have_sharded_weights_only_where_whole_ones_do_not_fit_alone(number):
    problem = crowded_problem(number)
    assert not any(map(is_sharded_beside_whole, Tables(problem, few=True).options))
    assert any(map(is_sharded_beside_whole, Tables(problem).options))


def test_a_plan_by_hand_needs_no_options(problem, monkeypatch):
    given = assignments_of(find_plan(problem, "heuristic", TO_THE_END_S).plan)
    monkeypatch.setattr(search, "_by_rule", lambda *_: search.Rules())
    assert assignments_of(find_plan(problem, "manual", 1e-9, evaluate=given).plan) == given


def test_where_options_take_longer_than_the_limit_and_no_rule_has_a_plan_the_limit_is_named(
    make_graph, ppo_cost
):
    small = preset("a100-80g-sxm").model_copy(update={"memory_bytes": 30 * 10**9, **ALL_FOR_TENSORS})
    problem = Problem(make_graph(n_seqs=128, mini_batches=4), ppo_cost(Cluster(1, 8), device=small))
    with pytest.raises(
        ProblemError,
        match=r"options of call 'actor_generate' .* 1x8 takes longer than the time limit\. Raise it, or choose fewer "
        r"devices for a host\.$",
    ):
        find_plan(problem, "search", time_limit_s=1e-9)


def test_the_time_limit_ends_the_plans_by_rule_which_have_seconds_under_any(
    make_graph, ppo_cost, monkeypatch
):
    """No first try of a rule fits here: without time for others there is no plan by rule. The first rule has more
    time than the others, which a busy machine may need."""
    small = preset("a100-80g-sxm").model_copy(update={"memory_bytes": 60 * 10**9, **ALL_FOR_TENSORS})
    problem = Problem(make_graph(n_seqs=128, mini_batches=4), ppo_cost(Cluster(1, 8), device=small))
    assert find_plan(problem, "search", time_limit_s=1e-9).late
    monkeypatch.setattr(search, "RULES_S", 0.0)
    assert find_plan(problem, "search", time_limit_s=1e-9).late
    monkeypatch.setattr(search, "FIRST_RULE_S", 0.0)
    with pytest.raises(ProblemError, match="takes longer than the time limit"):
        find_plan(problem, "search", time_limit_s=1e-9)


@pytest.mark.parametrize("limit_s", [30.0, pytest.param(100.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("mode", "code"), [("search", PAUSED), ("search", FOUND), ("mcmc", PAUSED)])
def test_a_time_limit_holds_where_every_step_takes_long(problem, monkeypatch, mode, code, limit_s):
    """By a clock on which a proposal takes .5 ms, an option of a search as long, and a plan's price 50 ms, as on ten
    thousand devices: the last steps and the price may come after the limit. Searches prove nothing; they end in the
    same choice again and again, or not at all."""
    now = [0.0]

    def taking(function, seconds):
        def slow(*arguments):
            now[0] += seconds(*arguments)
            return function(*arguments)

        return slow

    def continue_search(tree, state, threshold, nodes):
        if code == FOUND:
            state.found[:] = tree.relaxation.arrays.start[:-1]
        return code, threshold * (1 - 1e-6)

    slow_anneal = taking(anneal.anneal, lambda *arguments: 5e-4 * len(arguments[4]))
    monkeypatch.setattr(anneal, "anneal", slow_anneal)
    monkeypatch.setattr(
        branch, "continue_search", taking(continue_search, lambda *arguments: 5e-4 * arguments[3])
    )
    monkeypatch.setattr(search, "priced_choice", taking(priced_choice, lambda *_: 0.05))
    for module in (branch, deadlines, search.time):
        monkeypatch.setattr(module, "monotonic", lambda: now[0])
    result = find_plan(problem, mode, limit_s)
    assert 0.8 * limit_s < result.seconds <= limit_s + 0.5
    assert result.evaluations > 0


@pytest.mark.parametrize("mode", ["search", "mcmc"])
@pytest.mark.parametrize("looks", [1, 60, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_search_that_is_called_off_gives_the_best_plan_so_far_with_its_gap(small_problem, mode, looks):
    """While few options are priced and plans laid out, for hundreds of looks, that is a plan by rule, unbounded."""
    problem, asked = small_problem(Cluster(2, 4)), [0]

    def called_off():
        asked[0] += 1
        return asked[0] >= looks

    result = find_plan(problem, mode, TO_THE_END_S, called_off=called_off)
    assert asked[0] < looks + 20
    assert result.evaluations > 0
    assert 0 < result.gap <= 1
    assert (result.gap < 1) == (looks == 2000)
    assert not result.proven_optimal
    if mode == "search":
        assert result.iteration_time_s <= find_plan(problem, "heuristic", TO_THE_END_S).iteration_time_s


@pytest.mark.parametrize("mode", ["search", "mcmc"])
def test_a_search_where_nothing_fits_together_says_what_lacks(small_problem, mode):
    """Each call fits the one device alone, together they do not."""
    with pytest.raises(PlanError, match=r"Device 0 \(a100-80g-sxm\) lacks \d+ bytes: .* would lower it\."):
        find_plan(small_problem(Cluster(1, 1), memory=0.6e9), mode, 1)


def test_bad_requests(problem):
    with pytest.raises(PlanError, match="There is no mode 'best'; known are"):
        find_plan(problem, "best", TO_THE_END_S)
    with pytest.raises(PlanError, match="time limit of 0 s"):
        find_plan(problem, "search", time_limit_s=0)


def test_nearest_choice_finds_the_option_itself(problem):
    tables = Tables(problem)
    choice = [len(options) // 2 for options in tables.options]
    assert nearest_choice(tables, tables.assignments(choice)) == choice
