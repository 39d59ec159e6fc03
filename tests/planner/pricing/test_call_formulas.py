"""The price of responses that an environment answers turn by turn, and of the cache."""

import pytest

from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.workload import Lengths, Thinking, Workload
from prefect_rlhf.planner.pricing.call_formulas import blocks_of_cache, decoded_at_once, generate_in_turns
from prefect_rlhf.planner.pricing.rooflines import sizes
from prefect_rlhf.planner.pricing.terms import Crossings, OnMesh
from prefect_rlhf.rlhf_tasks.config.responses import EnvironmentConfig
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy

CLUSTER = Cluster(2, 8)


@pytest.fixture
def generation(make_graph, ppo_cost, assign):
    """The cost of PPO's generation of 64 samples on 8 devices."""

    def price(group_size=1, dp=4, **workload):
        call = make_graph(n_seqs=64, group_size=group_size).call("actor_generate")
        return ppo_cost(CLUSTER, **workload).call(call, assign(list(range(8)), dp, 1, 8 // dp))

    return price


class Paced:
    """A decoding step takes a second, and a tenth of one for each sequence; nothing else takes time."""

    def layer_s(self, kind, tokens, context):
        return tokens / 10 if kind == "decode" else 0.0

    def head_s(self, kind, tokens, context):
        return 1.0 if kind == "decode" else 0.0

    def embedding_s(self, kind, tokens):
        return 0.0

    def exchange_s(self, kind, ranks, size_bytes, crosses_hosts):
        return 0.0


@pytest.fixture
def played(make_graph, llama):
    """Seconds in which 10 tokens each are drawn for so many sequences, ten at a time, whose environments think."""

    def price(thinking, n_seqs=10):
        call = make_graph(n_seqs=n_seqs).call("actor_generate")
        local = sizes(llama(num_hidden_layers=1), "lm", 1)
        workload = Workload(
            prompt_tokens=10,
            new_tokens=Lengths.fixed(10),
            itemsize=4,
            recompute="none",
            thinking=thinking,
        )
        mesh = OnMesh(Paced(), workload, local, local, ParallelStrategy(), Crossings(False, False, False))
        return generate_in_turns(mesh, call, n_seqs // 10).seconds

    return price


def test_the_longest_of_more_responses_thinks_longer():
    """By hand: a second on the mean, and three more of the longest of ten; of a hundred twice as many more."""
    thinking = Thinking(mean_s=1.0, longest_s=4.0, among=10)
    assert [thinking.longest_of(n) for n in (1, 10, 100)] == pytest.approx([1.0, 4.0, 7.0])
    assert Thinking(mean_s=2.0, longest_s=2.0).longest_of(100) == 2.0


def test_where_all_wait_for_all_the_longest_answers_are_added_to_the_work(played):
    """By hand: ten steps of ten sequences take 10 x (1 + 10 / 10) s."""
    assert played(None) == pytest.approx(20.0)
    assert played(Thinking(mean_s=3.0, longest_s=9.0, among=10)) == pytest.approx(20.0 + 9.0)
    assert played(Thinking(mean_s=3.0, longest_s=9.0, among=100)) == pytest.approx(20.0 + 6.0)
    more = played(Thinking(mean_s=3.0, longest_s=9.0, among=10), n_seqs=20) - played(None, n_seqs=20)
    assert more == pytest.approx(9.0), "who was drawn first is answered while the others are drawn"


def test_where_nobody_waits_for_others_the_longest_response_or_the_work_decides(played):
    """By hand: of 40 s that a response takes, 20 s are thought, so five are drawn at a time: 10 x (1 + 5 / 10) s."""
    thinking = Thinking(together=False, mean_s=20.0, longest_s=24.0, among=10)
    assert played(thinking) == pytest.approx(15.0 + 24.0)
    assert played(thinking.model_copy(update={"mean_s": 0.0, "longest_s": 0.0})) == pytest.approx(20.0)
    # Of 50, ten are drawn at a time, which takes longer than the longest alone does: 20 s and what it thinks.
    brief = Thinking(together=False, mean_s=20.0, longest_s=24.0, among=50)
    assert played(None, n_seqs=50) > 20.0 + 24.0
    assert played(brief, n_seqs=50) == played(None, n_seqs=50)
    long = brief.model_copy(update={"longest_s": 1000.0})
    assert played(long, n_seqs=50) == pytest.approx(20.0 + 1000.0)


@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize("dp", [4, 8])
def test_turns_cost_what_the_whole_response_does_and_their_environments(generation, group_size, dp):
    """What was read before a turn is not read again for it."""
    lengths = Lengths(points=((40, 0.5), (80, 0.5)))
    once = generation(group_size, dp, new_tokens=lengths)
    found = generation(group_size, dp, new_tokens=lengths, thinking=Thinking(mean_s=21.0, longest_s=21.0))
    assert found.seconds == pytest.approx(once.seconds + 3 * 7.0, rel=1e-12)
    assert found.active_bytes == once.active_bytes


def test_the_cache_has_room_for_the_longest_prompt_however_many_turns(generation):
    typical, longest = generation(), generation(longest_prompt=240)
    assert longest.seconds == typical.seconds
    assert longest.active_bytes[0] - typical.active_bytes[0] == pytest.approx(
        generation(max_new_tokens=240).active_bytes[0] - typical.active_bytes[0]
    )
    turns, in_turns = (
        generation(thinking=Thinking(), longest_prompt=prompt, new_tokens=Lengths.fixed(40))
        for prompt in (None, 240)
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


def test_what_agents_ask_has_a_prompt_each_in_the_cache(ppo_cost):
    """160 tokens are 10 blocks. Their sequences begin in empty places: no prompt is known to be shared."""
    lengths = Lengths.fixed(33)
    workload = ppo_cost(CLUSTER, new_tokens=lengths, prompt_tokens=128, agents=True).workload
    assert blocks_of_cache(workload, 8, 1, 8, 1) == 8 * 10 + 1


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
