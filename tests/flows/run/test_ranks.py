"""How many ranks a run has."""

import pytest

from prefect_rlhf.flows.run.planning import (
    Ranks,
    decided,
    fastest,
    figures_of,
    profile_folder,
    rank_choices,
    rank_counts,
)
from prefect_rlhf.planner.plan.build import PlanError
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.pricing.figures import RanCall, keep_figures, store
from prefect_rlhf.planner.search.search import SearchResult, find_plan
from prefect_rlhf.rlhf_tasks.algorithms.configurations import RunConfig, make_config
from prefect_rlhf.rlhf_tasks.config.cluster import ClusterConfig
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan
from tests.flows.plan_documents import SHAPE, ppo
from tests.planner.sampled import as_measured


@pytest.fixture
def auto(tmp_path, monkeypatch) -> RunConfig:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("prefect_rlhf.flows.run.planning.gpus_here", tuple)
    return make_config(ppo(plan="auto", output_dir=str(tmp_path)))


def searched(ranks: Ranks) -> SearchResult:
    return find_plan(ranks.problem, "search", 5.0)


def plan_in(found: SearchResult) -> ExecutionPlan:
    return found.plan


def test_a_searched_plan_may_have_the_stated_ranks_or_fewer_that_divide_them(auto, monkeypatch):
    def counts(config=auto, **cluster):
        return rank_counts(config.model_copy(update={"cluster": auto.cluster.model_copy(update=cluster)}))

    assert counts(devices_per_host=4) == [4, 2, 1]
    assert counts(devices_per_host=1) == [1]
    assert counts(devices_per_host=4, address="tcp://127.0.0.1:1") == [4]
    assert counts(devices_per_host=4, n_hosts=2) == [4]
    assert counts(auto.model_copy(update={"plan": "heuristic"}), devices_per_host=4) == [4]
    monkeypatch.setattr("prefect_rlhf.flows.run.planning.gpus_here", lambda: ("0", "1", "2", "3"))
    assert counts(devices_per_host=4) == [4]


@pytest.fixture
def unstated(auto, monkeypatch) -> RunConfig:
    """A run on a machine of eight cores; nobody has said how many ranks."""
    for module in ("prefect_rlhf.flows.cluster.this_machine", "prefect_rlhf.flows.run.planning"):
        monkeypatch.setattr(f"{module}.cores_here", lambda: 8)
    return auto.model_copy(update={"cluster": ClusterConfig()})


def test_an_unstated_number_of_ranks_is_the_machines_choice(unstated, monkeypatch):
    def counts(**changes):
        return rank_counts(make_config({**unstated.model_dump(), **changes}))

    assert counts() == counts(plan="heuristic") == [2, 1, 4, 8]
    assert decided(unstated).cluster.devices_per_host == 2
    assert counts(plan={"actor_generate": "0"}) == [1]
    assert counts(cluster={"address": "tcp://127.0.0.1:1"}) == counts(cluster={"n_hosts": 2}) == [1]
    assert counts(planning={"device": "cpu-slot"}) == [1]
    monkeypatch.setattr("prefect_rlhf.flows.run.planning.gpus_here", lambda: ("0", "1", "2"))
    monkeypatch.setattr("prefect_rlhf.flows.run.planning.ranks_here", lambda: 3)
    assert counts() == [3], "a rank for each GPU"


def test_a_model_that_does_not_fit_the_machines_choice_has_fewer_ranks(unstated):
    choices = rank_choices(unstated)
    assert [choice.number for choice in choices] == [2, 1]

    def on_one(ranks: Ranks) -> SearchResult:
        if ranks.number > 1:
            raise PlanError("no memory")
        return searched(ranks)

    chosen, _, told = fastest(choices, on_one, plan_in)
    assert chosen.config.cluster.devices_per_host == 1
    assert told == "the run takes 1 rank of 8 threads: there is no plan for 2 ranks of 4 threads."
    chosen, _, told = fastest(choices[::-1], searched, plan_in)
    assert (chosen.number, told) == (1, None), "without measured profiles nothing is compared"


@pytest.mark.parametrize("number", [1, 8])
def test_a_measured_number_that_is_faster_replaces_the_machines_choice(unstated, number):
    for ranks in (1, 2, 8):
        its = 2.0 if ranks == number else 20.0
        profile = as_measured(SHAPE, Cluster(1, ranks), its).model_copy(update={"threads": 8 // ranks})
        store(profile, profile_folder(unstated))
    choices = rank_choices(unstated)
    assert [choice.number for choice in choices] == [2, 1, 8], "of four there is no profile"
    chosen, _, told = fastest(choices, searched, plan_in)
    assert chosen.number == number
    assert told is not None


@pytest.mark.parametrize(("one_rank", "taken"), [(0.4, 1), (1.0, 2)])
def test_the_number_of_ranks_follows_the_measured_figures(auto, one_rank, taken):
    """Two threads make one rank much faster, or not at all."""
    store(as_measured(SHAPE, Cluster(1, 2), 20.0), profile_folder(auto))
    store(as_measured(SHAPE, Cluster(1, 1), 20.0 * one_rank), profile_folder(auto))
    choices = rank_choices(auto)
    assert [choice.number for choice in choices] == [2, 1]
    chosen, found, told = fastest(choices, searched, plan_in)
    assert chosen.number == found.plan.n_devices == taken
    assert chosen.config.cluster.devices_per_host == taken
    if taken == 1:
        assert told is not None
        assert told.startswith("the run takes 1 rank of ")
        assert " s on 2 ranks of " in told
    else:
        assert told is None


def ran_slower(ranks: Ranks, times: float) -> None:
    """Keep figures of a run on so many ranks, whose calls took so many times what is planned."""
    plan, model = searched(ranks).plan, ranks.problem.model
    ran = [
        RanCall(
            call=name,
            assignment=given,
            seconds=times * model.call(ranks.problem.graph.call(name), given).seconds,
        )
        for name, (node, *_) in plan.calls.items()
        for given in [node.assignment]
    ]
    keep_figures(figures_of(ranks.config, ranks.problem), ran)


def test_what_one_number_of_ranks_took_in_a_run_does_not_make_another_one_look_faster(auto):
    """Runs are slower than their profiles say, whatever the number."""
    store(as_measured(SHAPE, Cluster(1, 2), 20.0), profile_folder(auto))
    store(as_measured(SHAPE, Cluster(1, 1), 24.0), profile_folder(auto))
    for number in (2, 1):
        for choice in rank_choices(auto):
            if choice.number == number:
                ran_slower(choice, 3.0)
        histories = [bool(choice.problem.model.history) for choice in rank_choices(auto)]
        assert histories == [True, number == 1]
        chosen, _, _ = fastest(rank_choices(auto), searched, plan_in)
        assert chosen.number == 2


def test_numbers_of_ranks_that_were_not_measured_are_not_compared(auto):
    assert [choice.number for choice in rank_choices(auto)] == [2]
    store(as_measured(SHAPE, Cluster(1, 1)), profile_folder(auto))
    assert [choice.number for choice in rank_choices(auto)] == [2], "the stated number has no profile"


@pytest.mark.parametrize(("stated", "kept", "taken"), [(2, 1, 1), (2, 8, 2), ("auto", 3, 3)])
def test_a_run_keeps_the_number_of_ranks_of_its_plan_on_any_machine(unstated, stated, kept, taken):
    """A number that the stated one does not allow is refused when the plan is checked."""
    config = unstated.model_copy(update={"cluster": ClusterConfig(devices_per_host=stated)})
    assert [choice.number for choice in rank_choices(config, kept=kept)] == [taken]


def test_a_number_of_ranks_without_a_plan_is_passed_over(auto):
    store(as_measured(SHAPE, Cluster(1, 2)), profile_folder(auto))
    store(as_measured(SHAPE, Cluster(1, 1), 1e-3), profile_folder(auto))

    def lacking(*numbers: int):
        def plan(ranks: Ranks) -> SearchResult:
            if ranks.number in numbers:
                raise PlanError(f"no memory on {ranks.number}")
            return searched(ranks)

        return plan

    chosen, _, told = fastest(rank_choices(auto), lacking(1), plan_in)
    assert (chosen.number, told) == (2, None)
    chosen, _, told = fastest(rank_choices(auto), lacking(2), plan_in)
    assert chosen.number == 1
    assert told is not None
    with pytest.raises(PlanError, match="no memory on 2"):
        fastest(rank_choices(auto), lacking(1, 2), plan_in)


def test_a_profile_of_another_number_of_threads_is_not_used(auto, monkeypatch):
    profile = as_measured(SHAPE, Cluster(1, 2)).model_copy(update={"threads": 7})
    store(profile, profile_folder(auto))
    (stated,) = rank_choices(auto)
    assert not stated.measured
    (warning,) = stated.problem.warnings
    assert "computed with 7 threads, those of this run have" in warning
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert rank_choices(auto)[0].measured
