"""Sequencer: a plan as numbered requests."""

import random
from dataclasses import replace

from prefect_rlhf.rlhf_tasks.protocol.sequencer import Deadlines, Sequencer
from prefect_rlhf.rlhf_tasks.spec import FetchNode, NodeKey, RolePlacements, SaveNode, SyncNode
from tests.rlhf_tasks.protocol.plans import random_plan, small_plan
from tests.rlhf_tasks.settings import DEADLINES


def sequencer(**changes) -> Sequencer:
    return Sequencer(small_plan(), "run", 1, **({"deadlines": DEADLINES} | changes))


def test_each_rank_gets_its_subsequence_with_dense_numbers():
    first, second = sequencer().requests(0), sequencer().requests(1)
    assert {rank: [(r.number, r.key.node) for r in mine] for rank, mine in first.items()} == {
        0: list(enumerate(["to_generate", "generate", "release", "actor_train", "save_actor"])),
        1: list(enumerate(["to_generate", "generate", "release", "actor_train", "save_actor"])),
        2: list(enumerate(["to_generate", "generate", "release", "values", "critic_train", "save_critic"])),
    }
    assert [request.number for request in second[0]] == [5, 6, 7, 8, 9]
    assert [request.number for request in second[2]] == [6, 7, 8, 9, 10, 11]


def test_versions_count_the_train_steps_before_a_node():
    versions = {r.key.node: r.versions for mine in sequencer().requests(3).values() for r in mine}
    assert versions == {
        "to_generate": {"actor": 3},
        "generate": {"actor": 3},
        "release": {"actor": 3},
        "values": {"critic": 3},
        "actor_train": {"actor": 3},
        "save_actor": {"actor": 4},
        "critic_train": {"critic": 3},
        "save_critic": {"critic": 4},
    }


def test_a_role_that_follows_has_a_new_version_with_each_sync_which_reads_the_trained_one():
    plan = small_plan()
    train, ref = plan.node("actor_train"), plan.node("generate").placement
    nodes = (
        *plan.nodes,
        SyncNode(name="sync_ref", role="ref", leader="actor", source=train.placement, destination=ref),
        SaveNode(name="save_ref", role="ref", placement=ref),
    )
    follows = {"ref": RolePlacements(trained=False, placements=(ref,), follows="actor")}
    followed = plan.model_copy(update={"nodes": nodes, "roles": plan.roles | follows})
    of_run = Sequencer(followed, "run", 1, DEADLINES)
    versions = {r.key.node: r.versions for mine in of_run.requests(3).values() for r in mine}
    assert versions["sync_ref"] == {"ref": 3, "actor": 4}
    assert versions["save_ref"] == {"ref": 4}
    assert of_run.versions(5) == {"actor": 5, "critic": 5, "ref": 5}


def test_a_copy_keeps_the_version_it_was_made_with_although_the_role_trains_on():
    plan = small_plan()
    order = ["to_generate", "actor_train", "generate", "release", "save_actor"]
    late = plan.model_copy(update={"nodes": tuple(plan.node(name) for name in order)})
    versions = {r.key.node: r.versions["actor"] for r in Sequencer(late, "run", 0, DEADLINES).requests(0)[0]}
    assert versions == {
        "to_generate": 0,
        "actor_train": 0,
        "generate": 0,
        "release": 0,
        "save_actor": 1,
    }


def test_the_cursor_moves_by_the_fetched_sequences_from_where_the_commit_left_it():
    assert [sequencer().cursor(t) for t in (0, 1, 5)] == [0, 8, 40]
    resumed = sequencer(first_iteration=5, first_sample=100)
    assert [r.first_sample for t in (5, 6) for r in resumed.requests(t)[0][:1]] == [100, 108]


def test_a_deadline_is_a_multiple_of_the_prediction_and_never_below_the_floor():
    deadlines = Deadlines(5, 30, {"generate": 20.0, "release": 0.1})
    seconds = {r.key.node: r.deadline_s for r in sequencer(deadlines=deadlines).requests(0)[0]}
    assert (seconds["generate"], seconds["release"], seconds["save_actor"]) == (100, 30, 30)


def test_a_deadline_allows_for_the_users_own_code_in_every_generation():
    deadlines = Deadlines(5, 30, {"generate": 20.0}, {"generate": 600.0, "release": 7.0})
    first = sequencer(deadlines=deadlines)
    later = first.starting_at(1, 2)
    assert [of.deadlines.of("generate") for of in (first, later)] == [700, 700]
    assert [of.deadlines.of("release") for of in (first, later)] == [37, 37]


def test_a_new_generation_sends_the_same_requests_under_new_names_and_numbers():
    for seed in range(20):
        plan = random_plan(random.Random(seed), 5, 30)
        old = Sequencer(plan, "run", 1, DEADLINES, first_sample=3)
        new = old.starting_at(2, 4)
        for rank, mine in new.requests(6).items():
            before = old.requests(6)[rank]
            assert [r.number for r in mine] == [r.number - 4 * old.work[rank] for r in before]
            assert [r.key for r in mine] == [NodeKey("run", 1, 2, 6, r.key.node) for r in before]
            plain = [replace(r, key=old.key(6, ""), number=0) for r in mine]
            assert plain == [replace(r, key=old.key(6, ""), number=0) for r in before]


def test_samples_go_on_with_a_whole_group_after_a_change_of_the_groups():
    plan = small_plan()
    place = plan.nodes[1].placement
    fetch = FetchNode(name="fetch", call="generate", placement=place, keys=("prompt_ids",), group_size=4)
    grouped = plan.model_copy(update={"nodes": (fetch, *plan.nodes)})
    first = [
        Sequencer(grouped, "run", 1, DEADLINES, first_iteration=1, first_sample=at).whole_groups().cursor(1)
        for at in (4, 6, 8)
    ]
    assert first == [4, 8, 8]
    assert sequencer(first_sample=7).whole_groups().first_sample == 7
