"""What an iteration draws in segments, against the work that there is and against schedules by hand; its price."""

import pytest

from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.workload import Lengths
from prefect_rlhf.planner.pricing.segments import drawn

TAIL = Lengths(points=((8, 0.45), (20, 0.45), (120, 0.05), (160, 0.05)))


@pytest.mark.parametrize("segment", [4, 16, 50])
@pytest.mark.parametrize(("n_groups", "size"), [(64, 1), (32, 4), (4096, 1)])
def test_an_iteration_draws_as_many_tokens_as_a_batch_has(segment, n_groups, size):
    found = drawn(30, TAIL.points, segment, n_groups, size)
    tokens = sum(one.steps * one.running for one in found.rounds)
    assert tokens == pytest.approx(TAIL.mean, rel=0.05)
    assert all(one.steps <= segment and one.running <= one.begins <= 2 for one in found.rounds)


def test_responses_of_one_segment_are_drawn_an_iteration_before_they_are_learned_from():
    """Places of two batches end in the first iteration, so each later one draws a batch and delivers the other."""
    found = drawn(30, ((16, 1.0),), 16, 8, 2)
    assert (found.reads, found.read_tokens) == (1 / 2, 30)
    assert found.rounds == ((16, 1, 1, 30 + 17 / 2),)


def test_responses_of_two_segments_are_drawn_in_two_rounds_or_read_again():
    found = drawn(30, ((32, 1.0),), 16, 8, 1)
    assert sum(one.steps * one.running for one in found.rounds) == pytest.approx(32)
    assert 1 <= found.reads <= 2
    assert 30 <= found.read_tokens <= 46


def test_of_sequences_of_several_lengths_as_many_columns_are_read_as_the_longest_near_them_has():
    """Responses of two segments: in each round half of the sequences have a segment after them, or not yet any."""
    (apart,) = drawn(4, ((32, 1.0),), 16, 8, 1).rounds
    (together,) = drawn(20, ((32, 1.0),), 16, 8, 1).rounds
    assert apart.context == pytest.approx((4 + 20) / 2 + 17 / 2)
    assert together.context == pytest.approx(36 + 17 / 2)


def test_what_is_read_again_are_the_sequences_of_later_rounds_however_rare_these_are():
    found = drawn(30, ((16, 0.5), (40, 0.3), (64, 0.2)), 16, 8, 1)
    assert found.rounds[-1].steps < 1, "not many iterations have it"
    assert 0 < found.again < 0.5 * sum(one.begins for one in found.rounds[1:])
    assert 30 + 16 <= found.again_tokens < 30 + 64


def test_shorter_segments_wait_less_and_read_more():
    short, long = (drawn(30, TAIL.points, segment, 64, 1) for segment in (8, 64))
    assert sum(one.steps for one in short.rounds) < sum(one.steps for one in long.rounds) < 160
    assert short.reads * short.read_tokens > 1.5 * long.reads * long.read_tokens


def test_generation_in_segments_is_cheaper_where_steps_wait_for_few_and_has_a_cache_for_two_batches(
    make_graph, ppo_cost, assign
):
    model = ppo_cost(Cluster(1, 8), new_tokens=TAIL, prompt_tokens=30)
    whole = make_graph(n_seqs=64).call("actor_generate")
    here = assign(list(range(8)), 2, 4, 1)
    priced = {
        segment: model.call(whole.model_copy(update={"segment_tokens": segment}), here)
        for segment in (None, 16)
    }
    assert priced[16].seconds < 0.5 * priced[None].seconds
    assert priced[16].active_bytes[0] > 1.5 * priced[None].active_bytes[0]
    fewer_slots = here.model_copy(update={"micro_batches": 4})
    in_turns = model.call(whole.model_copy(update={"segment_tokens": 16}), fewer_slots)
    assert in_turns.active_bytes[0] < 0.5 * priced[16].active_bytes[0]
    assert in_turns.seconds > priced[16].seconds
