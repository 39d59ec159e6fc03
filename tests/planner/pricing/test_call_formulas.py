"""The price of responses that an environment answers turn by turn, and of the cache."""

import pytest

from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.workload import Lengths
from prefect_rlhf.planner.pricing.call_formulas import blocks_of_cache, decoded_at_once
from prefect_rlhf.rlhf_tasks.config.responses import EnvironmentConfig

CLUSTER = Cluster(2, 8)


@pytest.fixture
def generation(make_graph, ppo_cost, assign):
    """The cost of PPO's generation of 64 samples on 8 devices."""

    def price(group_size=1, dp=4, **workload):
        call = make_graph(n_seqs=64, group_size=group_size).call("actor_generate")
        return ppo_cost(CLUSTER, **workload).call(call, assign(list(range(8)), dp, 1, 8 // dp))

    return price


@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize("dp", [4, 8])
def test_turns_cost_what_the_whole_response_does_and_their_environments(generation, group_size, dp):
    """What was read before a turn is not read again for it."""
    lengths = Lengths(points=((40, 0.5), (80, 0.5)))
    once = generation(group_size, dp, new_tokens=lengths)
    found = generation(group_size, dp, new_tokens=lengths, turns=3, environment_s=7.0)
    assert found.seconds == pytest.approx(once.seconds + 3 * 7.0, rel=1e-12)
    assert found.active_bytes == once.active_bytes


def test_the_cache_has_room_for_the_longest_prompt_however_many_turns(generation):
    typical, longest = generation(), generation(longest_prompt=240)
    assert longest.seconds == typical.seconds
    assert longest.active_bytes[0] - typical.active_bytes[0] == pytest.approx(
        generation(max_new_tokens=240).active_bytes[0] - typical.active_bytes[0]
    )
    turns, in_turns = (
        generation(turns=2, longest_prompt=prompt, new_tokens=Lengths.fixed(40)) for prompt in (None, 240)
    )
    grown = in_turns.active_bytes[0] - turns.active_bytes[0]
    assert grown == pytest.approx(longest.active_bytes[0] - typical.active_bytes[0])


@pytest.mark.parametrize(
    ("bounds", "tokens", "turns"),
    [
        ({"max_turns": 8}, 100, 8),
        ({"max_turns": 8}, 3, 3),
        ({"max_turns": 8, "max_turn_tokens": 20}, 100, 5),
        ({"max_turns": 8, "max_turn_tokens": 20}, 101, 6),
        ({"max_turns": 8, "max_turn_tokens": 1}, 100, 8),
        ({"max_turns": 8, "max_turn_tokens": 200}, 100, 1),
    ],
)
def test_the_planner_counts_as_many_turns_as_a_response_fills(bounds, tokens, turns):
    assert EnvironmentConfig(factory="builtin:GuessingGame", **bounds).turns_of(tokens) == turns


def test_samples_of_a_prompt_have_its_blocks_once(generation, llama):
    """128 tokens: all but the last one, in whole blocks of 16, are 112. Of 16 samples on a device, 14 share them."""
    alone, shared = (generation(size, dp=8).active_bytes[0] for size in (1, 8))
    of_token = 2 * 32 * 128 * 2 * llama().layers
    assert alone - shared >= (8 - 1) * 112 * of_token, "fewer tokens are read at a time, too"


@pytest.mark.parametrize(
    ("share", "group_size", "groups", "prompt", "new", "blocks"),
    [
        (32, 32, 4, 2048, 200, 960),
        (64, 64, 4, 4096, 512, 3136),
        (16, 16, 2, 1024, 256, 400),
        (8, 1, 1, 31, 2, 17),
        (8, 8, 1, 128, 33, 8 * 10 - 7 * 7 + 1),
    ],
)
def test_a_prompt_that_is_cut_over_the_groups_in_flight_is_read_by_each(
    ppo_cost, share, group_size, groups, prompt, new, blocks
):
    """By hand: of 32 samples of 141 blocks, 127 are shared in each of 4 groups; and a block that nobody reads."""
    lengths = Lengths.fixed(new)
    workload = ppo_cost(CLUSTER, new_tokens=lengths, max_new_tokens=new, prompt_tokens=prompt).workload
    assert blocks_of_cache(workload, share, groups, group_size, 1) == blocks


def test_as_many_are_decoded_at_a_time_as_the_cache_is_expected_to_have_room_for(ppo_cost):
    def at_once(lengths: Lengths, micro_batches: int = 4, **more) -> int:
        workload = ppo_cost(CLUSTER, new_tokens=lengths, max_new_tokens=960, prompt_tokens=64).workload
        return decoded_at_once(workload, 128, 2, 1, micro_batches, **more)

    tail = Lengths(points=((96, 0.9), (960, 0.1)))
    assert at_once(Lengths.fixed(960)) == 128 // 4, "none ends before it has the room of the longest"
    # In the mean 182.4 tokens; at a random step, halfway through by length, 275.4.
    assert at_once(tail) == 2 * int(16 * (64 + 960) / (64 + 275.4 + 182.4))
    assert at_once(tail, states=True) == 128 // 4
    assert at_once(Lengths.fixed(1)) == 128, "four for each slot, at most"
    assert at_once(tail, 1) == 128
