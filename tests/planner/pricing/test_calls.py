"""Orders of magnitude by hand, what must make a call dearer, and the mistakes of earlier planners."""

from dataclasses import replace

import pytest
import torch

from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.workload import EvaluationWork, Lengths, OtherEngine
from prefect_rlhf.planner.pricing.calls import CallCost
from prefect_rlhf.planner.pricing.devices import PRESETS, DeviceLink, preset
from prefect_rlhf.planner.pricing.rooflines import Roofline, sizes
from prefect_rlhf.planner.pricing.terms import Crossings, OnMesh
from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import split
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy
from prefect_rlhf.rlhf_tasks.parallel.layout.work import LEAST_SHARED

CLUSTER = Cluster(2, 8)


@pytest.fixture
def seconds(make_graph, ppo_cost, assign):
    """Seconds of a call of PPO with 512 sequences: seconds(call, dp, tp, pp, ...)."""

    def price(name, dp=1, tp=1, pp=1, cp=1, *, n_seqs=512, micro_batches=1, first=0, **cost):
        model = ppo_cost(CLUSTER, **cost)
        devices = list(range(first, first + dp * tp * pp * cp))
        assignment = assign(devices, dp, tp, pp, cp, micro_batches=micro_batches)
        return model.call(make_graph(n_seqs=n_seqs, mini_batches=4).call(name), assignment).seconds

    return price


@pytest.fixture
def active(make_graph, ppo_cost, assign):
    def price(name, dp=1, tp=1, pp=1, cp=1, *, n_seqs=512, micro_batches=1, **cost):
        assignment = assign(list(range(dp * tp * pp * cp)), dp, tp, pp, cp, micro_batches=micro_batches)
        graph = make_graph(n_seqs=n_seqs, mini_batches=4)
        return ppo_cost(CLUSTER, **cost).call(graph.call(name), assignment).active_bytes

    return price


def test_inference_of_7b_by_hand(seconds):
    """2 FLOPs x 6.6e9 parameters x 512 x 256 tokens at half of 312 TFLOP/s on 8 devices: seconds, not ms."""
    by_hand = 2 * 6.6e9 * 512 * 256 / (0.5 * 312e12) / 8
    assert seconds("ref_inference", dp=8) == pytest.approx(by_hand, rel=0.1)


def test_training_is_four_forward_passes_with_recomputation(seconds):
    forward = seconds("ref_inference", dp=8)
    without, selective, full = (
        seconds("actor_train", dp=8, recompute=what) for what in ("none", "selective", "full")
    )
    assert 3 * forward < without < 3.6 * forward
    assert without + 0.05 * forward < selective < without + 0.15 * forward
    assert 4 * forward < full < 4.8 * forward


@pytest.mark.parametrize(("call", "passes"), [("ref_inference", 1), ("actor_train", 3)])
def test_a_language_models_head_computes_only_tokens_that_count(seconds, active, llama, call, passes):
    """By hand: 2 FLOPs x hidden x vocabulary for each of the 128 prompt tokens, and two passes more back."""
    all_s, counted_s = (seconds(call, dp=8, counted_tokens=n) for n in (None, 128))
    by_hand = passes * 2 * 4096 * 32000 * 512 * 128 / (0.5 * 312e12) / 8
    assert all_s - counted_s == pytest.approx(by_hand, rel=0.05)
    many = {"prompt_tokens": 1920, "n_seqs": 64, "shape": llama(vocab_size=256_000)}
    assert max(active(call, **many)) > 1.5 * max(active(call, **many, counted_tokens=128))


def test_log_probabilities_take_two_float32_copies_of_a_few_rows_beside_the_logits(active, llama):
    """Of 2^24 logits at a time on a GPU."""
    one = {"n_seqs": 4, "micro_batches": 4, "prompt_tokens": 1920, "shape": llama(vocab_size=256_000)}
    assert active("ref_inference", **one)[0] == pytest.approx(2048 * 256_000 * 2 + 2**24 * 2 * 4)


def test_a_prefill_has_no_room_for_logits_that_are_not_computed(active, llama):
    """Logits of every prompt's last token are; those of all their tokens would be 3.4 GB more."""
    few = {"n_seqs": 4, "prompt_tokens": 1920}
    small, large = (active("actor_generate", **few, shape=llama(vocab_size=n))[0] for n in (32_000, 256_000))
    assert large - small < 4 * 224_000 * 20


def test_a_scalar_head_computes_every_token(seconds):
    for call in ("critic_inference", "critic_train", "reward_inference"):
        assert seconds(call, dp=8, counted_tokens=128) == seconds(call, dp=8)


@pytest.mark.parametrize("call", ["ref_inference", "actor_train"])
def test_micro_batches_of_few_tokens_are_priced_as_that_many(seconds, active, call):
    """512 sequences of 256 tokens in 4 mini-batches (inference: in one) on 8 ranks; micro-batches of 1,100 tokens."""
    count = 16 if call == "ref_inference" else 4
    for price in (seconds, active):
        cut = price(call, dp=8, micro_batch_tokens=1100)
        assert cut == price(call, dp=8, micro_batches=count)
        assert cut == price(call, dp=8, micro_batches=2, micro_batch_tokens=1100)
        assert cut != price(call, dp=8)


def test_epochs_repeat_the_training(seconds):
    assert seconds("actor_train", dp=8, epochs=3) == pytest.approx(3 * seconds("actor_train", dp=8))


def test_training_and_inference_are_priced_with_their_responses(seconds):
    short = Lengths.fixed(1)
    for call in ("ref_inference", "actor_train"):
        assert seconds(call, dp=8) > 1.7 * seconds(call, dp=8, new_tokens=short)


@pytest.mark.parametrize("call", ["actor_generate", "ref_inference", "actor_train"])
def test_tensor_parallelism_costs_communication(seconds, call):
    assert seconds(call, dp=1, tp=8, n_seqs=64) > seconds(call, dp=1, tp=1, n_seqs=64) / 8 * 1.1


def test_data_parallel_training_pays_for_its_gradients(seconds):
    """The same load per device, but gradients to reduce: in float32, once in each of four steps."""
    slow = DeviceLink(bytes_per_s=1e9, latency_s=0.0)
    device = preset("a100-80g-sxm").model_copy(update={"inside_host": slow, "exchange_overlap": 0.0})
    reduced_s = 4 * (4 + 2) * 6.7e9 * 7 / 8 / (0.8 * 1e9)
    more_s = seconds("actor_train", dp=8, n_seqs=512, device=device) - seconds("actor_train", n_seqs=64)
    assert more_s == pytest.approx(reduced_s, rel=0.05)


def test_links_between_hosts_are_slower(seconds):
    assert seconds("actor_train", tp=16) > 1.5 * seconds("actor_train", tp=8)
    across, inside = (
        seconds("actor_train", dp=2, tp=8, first=0),
        seconds("actor_train", dp=1, tp=8, n_seqs=256),
    )
    assert across > inside


def test_pipelines_have_bubbles_that_micro_batches_fill(seconds):
    one, four, sixteen = (seconds("actor_train", pp=8, micro_batches=m) for m in (1, 4, 16))
    assert one > 1.5 * four > 1.5 * sixteen
    assert sixteen > seconds("actor_train", dp=8)


def test_uneven_stages_count_the_longest(seconds, llama):
    """33 layers on 2 stages take as long as 34."""
    odd, even = (
        seconds("ref_inference", pp=2, micro_batches=64, shape=llama(num_hidden_layers=n)) for n in (33, 34)
    )
    assert odd == pytest.approx(even, rel=0.02)


def test_uneven_shares_count_the_largest(seconds):
    assert seconds("ref_inference", dp=3, n_seqs=10) == seconds("ref_inference", dp=3, n_seqs=12)


def test_small_batches_decode_at_the_hosts_pace(seconds):
    """Without CUDA graphs (1 ms a layer) decoding hardly depends on the batch, and tp does not help it."""
    slow = preset("a100-80g-sxm").model_copy(update={"decode_overhead_s": 1e-3})
    few = seconds("actor_generate", n_seqs=8, device=slow)
    assert few == pytest.approx(32 * 128 * 1e-3, rel=0.5)
    assert seconds("actor_generate", tp=8, n_seqs=8, device=slow) > 0.6 * few
    assert seconds("actor_generate", n_seqs=8) < 0.5 * few


def test_decoding_reads_the_weights_each_step(seconds):
    """Four sequences: 13.2 GB of weights per token over 80% of 2.04 TB/s."""
    by_hand = 128 * 13.2e9 / (0.8 * 2.039e12)
    assert seconds("actor_generate", n_seqs=4) == pytest.approx(by_hand, rel=0.2)


MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
"""Mixtral 8x7B: 46.7 billion parameters, of which 45.1 are of experts, and a token passes a quarter of these."""


def test_a_mixture_computes_the_experts_that_a_token_is_given_to(seconds, llama):
    mixture = ModelShape.from_config(MIXTRAL)
    as_dense = llama(**{**MIXTRAL, "model_type": "llama", "intermediate_size": 2 * 14336})
    for call in ("ref_inference", "actor_train"):
        # copying and sorting tokens, and launching experts, cost a little
        took, dense = (seconds(call, tp=8, shape=shape) for shape in (mixture, as_dense))
        assert dense < took < 1.25 * dense


def test_memory_has_room_for_the_branches_of_all_experts_at_once(ppo_cost):
    """Of each token the copies for two experts, their two branches, and the product of these in float32."""
    local, tokens = sizes(ModelShape.from_config(MIXTRAL), "lm", 1), 8192
    timing = Roofline(preset("a100-80g-sxm"), local, "lm", 1, False, 2)
    here = ParallelStrategy(), Crossings(False, False, False)
    mesh = OnMesh(timing, ppo_cost(CLUSTER).workload, local, local, *here)
    needed = tokens * 2 * (2 * 4096 + (1 + 1 + 2) * 2 * 14336)
    assert needed <= mesh.working_bytes(tokens, 0, gradients=False) <= 1.3 * needed


def test_decoding_a_mixture_reads_the_experts_of_the_sequences(seconds):
    """Three quarters of the experts are not chosen by a sequence, a third by none of four."""
    device = preset("a100-80g-sxm").model_copy(update={"layer_overhead_s": 1e-9})
    by_hand = [128 * 2 * (46.7e9 - 45.1e9 * (3 / 4) ** sequences) / (0.8 * 2.039e12) for sequences in (4, 16)]
    mixture = ModelShape.from_config(MIXTRAL)
    took = [seconds("actor_generate", n_seqs=n, shape=mixture, device=device) for n in (4, 16)]
    assert took == pytest.approx(by_hand, rel=0.2)
    one_by_one = device.model_copy(update={"expert_overhead_s": 1e-4})
    launched = seconds("actor_generate", n_seqs=16, shape=mixture, device=one_by_one)
    assert launched == pytest.approx(took[1] + 32 * 128 * 8 * 1e-4, rel=0.05)


def test_fewer_slots_take_less_memory_and_more_time(seconds, active):
    took = [seconds("actor_generate", micro_batches=m) for m in (1, 2, 4, 8)]
    assert took == sorted(took)
    assert took[0] < took[-1]
    cache, half = (active("actor_generate", micro_batches=m) for m in (1, 2))
    assert half[0] == pytest.approx(cache[0] / 2, rel=0.1)


def test_refilled_slots_take_the_work_not_the_longest_response_each_time(seconds):
    """Of a long tail, a quarter of the slots takes far less than four times the longest response."""
    tail = Lengths(points=((64, 0.95), (1024, 0.05)))
    at_once = seconds("actor_generate", new_tokens=tail, max_new_tokens=1024)
    refilled = seconds("actor_generate", new_tokens=tail, max_new_tokens=1024, micro_batches=4)
    assert at_once < refilled < 2 * at_once


def test_a_prompt_is_read_once_for_its_group(make_graph, ppo_cost, assign):
    call = make_graph(n_seqs=512).call("actor_generate")
    model = ppo_cost(CLUSTER, prompt_tokens=2000, new_tokens=Lengths.fixed(1))
    alone, shared = (
        model.call(call.model_copy(update={"group_size": size}), assign([0], 1, 1, 1)).seconds
        for size in (1, 8)
    )
    assert shared < alone / 5


@pytest.mark.parametrize(("name", "mini_batches"), [("ref_inference", 1), ("actor_train", 4)])
@pytest.mark.parametrize("pp", [1, 2])
def test_a_prompt_is_computed_once_for_the_samples_of_its_group(
    make_graph, ppo_cost, assign, name: str, mini_batches: int, pp: int
):
    """Groups of 8 samples of 1024 + 128 tokens cost about what one long prompt and eight answers do."""
    call = make_graph(n_seqs=512, mini_batches=mini_batches).call(name)
    place = assign(list(range(pp)), pp=pp, micro_batches=4)
    model = ppo_cost(CLUSTER, prompt_tokens=1024, new_tokens=Lengths.fixed(128), counted_tokens=128)
    alone, shared = (model.call(call.model_copy(update={"group_size": size}), place) for size in (1, 8))
    share = (1024 + 8 * 128) / (8 * (1024 + 128))
    assert share < shared.seconds / alone.seconds < 1.3 * share
    assert share < max(shared.active_bytes) / max(alone.active_bytes) < 1.6 * share


def test_the_head_computes_as_many_rows_of_samples_that_share_a_prompt(make_graph, ppo_cost, assign):
    call = make_graph(n_seqs=512).call("ref_inference")

    def head_s(size: int) -> float:
        """Seconds of the rows that do not count."""
        of_group = call.model_copy(update={"group_size": size})
        all_s, counted_s = (
            ppo_cost(CLUSTER, counted_tokens=tokens).call(of_group, assign([0])).seconds
            for tokens in (None, 128)
        )
        return all_s - counted_s

    assert head_s(8) == pytest.approx(head_s(1))


def test_a_prompt_of_few_tokens_is_computed_for_each_sample(make_graph, ppo_cost, assign):
    call = make_graph(n_seqs=512).call("ref_inference")
    prices = {
        tokens: [
            ppo_cost(CLUSTER, prompt_tokens=tokens)
            .call(call.model_copy(update={"group_size": size}), assign([0]))
            .seconds
            for size in (1, 8)
        ]
        for tokens in (LEAST_SHARED - 1, LEAST_SHARED)
    }
    assert prices[LEAST_SHARED - 1][0] == prices[LEAST_SHARED - 1][1]
    assert prices[LEAST_SHARED][0] > prices[LEAST_SHARED][1]


@pytest.mark.parametrize("prompt", [16, 40])
@pytest.mark.parametrize(("groups", "size"), [(1, 12), (3, 4), (4, 3), (2, 6), (12, 1)])
def test_no_fewer_prompts_are_priced_than_the_engine_computes(
    ppo_cost, llama, groups: int, size: int, prompt: int
):
    """On average and in the fullest micro-batch; exactly as many where micro-batches have whole groups."""
    local = sizes(llama(), "lm", 1)
    timing = Roofline(preset("a100-80g-sxm"), local, "lm", 1, False, 2)
    here = ParallelStrategy(), Crossings(False, False, False)
    mesh, share = OnMesh(timing, ppo_cost(CLUSTER).workload, local, local, *here), groups * size
    sequences = [
        torch.cat([torch.arange(prompt) + 1000 * group, torch.full((4,), 10**6 + sample)])
        for group in range(groups)
        for sample in range(size)
    ]
    batch = SampleBatch(tuple(range(share)), {"input_ids": Packed.of(sequences)})
    for count in range(1, share + 1):
        computed = [micro.computed_tokens for micro in split(batch, count)]
        mean, most = mesh.prompts(share, count, size)
        assert sum(computed) <= share * 4 + mean * count * prompt
        assert max(computed) <= -(-share // count) * 4 + most * prompt
        if groups % count == 0:
            assert computed == [share // count * 4 + mean * prompt] * count


def test_early_leaving_lies_between_the_shortest_and_the_longest(seconds):
    mixed = Lengths(points=((64, 0.75), (512, 0.25)))
    short, middle, long = (
        seconds("actor_generate", new_tokens=lengths)
        for lengths in (Lengths.fixed(64), mixed, Lengths.fixed(512))
    )
    assert short < middle < long
    assert middle < 0.8 * long


def test_kv_cache_counts_grouped_heads(active, llama):
    full = active("actor_generate", dp=8)[0]
    grouped = active("actor_generate", dp=8, shape=llama(num_key_value_heads=8))[0]
    cache = 64 * 256 * 2 * 32 * 128 * 32 * 2  # sequences, tokens, keys and values, heads, width, layers, bf16
    assert full - grouped == pytest.approx(cache * 3 / 4, rel=0.02)
    assert full > cache


@pytest.mark.parametrize(("recompute", "times"), [("none", 32 + 2), ("selective", 3)])
def test_scores_with_sinks_stand_in_memory(active, llama, recompute, times):
    """Of 4 sequences of 256 tokens: 32 heads' probabilities in float32 and bfloat16, and a mask. Each of 32 layers
    keeps them, or the one that is computed again; and the temporary ones of a layer count twice."""
    scores = 4 * 256 * 256 * (32 * (4 + 2) + 1)
    plain, sinks = (
        active("actor_train", n_seqs=16, shape=shape, recompute=recompute)[0]
        for shape in (llama(), replace(llama(), sinks=True))
    )
    assert sinks - plain == pytest.approx(times * scores)


def test_prefills_and_steps_have_scores_of_one_layer(active, llama):
    """512 prompts of 128 tokens are read in passes of 8192 tokens; a step has 512 sequences of up to 256 tokens."""
    plain, sinks = (
        active("actor_generate", shape=shape)[0] for shape in (llama(), replace(llama(), sinks=True))
    )
    assert sinks - plain == pytest.approx(8192 * 128 * (32 * (4 + 2) + 1))


def test_a_step_in_bfloat16_on_a_cpu_attends_to_a_part_in_float32(active):
    """A rank has 2 sequences of 8,192 tokens. Beside the cache are keys and values of one sequence, as they are and
    in float32; in a model of float32 those of both."""
    of_cpu = {"device": preset("cpu-slot"), "n_seqs": 8, "new_tokens": Lengths.fixed(8192 - 128)}
    half, whole = (active("actor_generate", dp=4, itemsize=size, **of_cpu)[0] for size in (2, 4))
    of_row = 8192 * 2 * 32 * 128 * 2  # tokens, keys and values, heads, width, bfloat16
    assert 2 * half - whole == pytest.approx(2 * 3 * of_row - 2 * 2 * of_row)


def test_stages_without_attention_have_no_cache(active, llama):
    kinds = {"kinds": ("convolution",) * 2 + ("attention",) * 2, "kernel": 3}
    mixed = replace(llama(num_hidden_layers=4), **kinds)
    first, last = active("actor_generate", pp=2, shape=mixed, n_seqs=4096, micro_batches=1)
    cache = (
        4096 * 256 * 2 * 32 * 128 * 2 * 2
    )  # sequences, tokens, keys and values, heads, width, layers, bf16
    assert last - first == pytest.approx(cache, rel=0.02)


def test_the_stage_with_the_dear_layers_sets_the_pace(seconds, llama):
    """Of 4 layers the first 2 have MLPs of 11008 columns, the others 2 of 8 experts of 1024: in 64 micro-batches
    through two stages, the first one is waited for 64 times. At half of 312 TFLOP/s."""
    mixture = {"experts": 8, "experts_per_token": 2, "dense_layers": (0, 1), "dense_columns": 11008}
    unlike = replace(
        llama(num_hidden_layers=4, vocab_size=512), family="glm4_moe", intermediate=1024, **mixture
    )
    attention, token_s = 4 * 4096**2, 2 / (0.5 * 312e12)
    dear_s = 2 * (attention + 3 * 4096 * 11008) * token_s
    cheap_s = 2 * (attention + 2 * 3 * 4096 * 1024) * token_s
    by_hand = 8192 * 256 / 64 * (64 * dear_s + cheap_s)
    assert seconds("ref_inference", pp=2, shape=unlike, n_seqs=8192, micro_batches=64) == pytest.approx(
        by_hand, rel=0.1
    )


@pytest.mark.parametrize(
    ("how", "measured"),
    [({}, (50, 34, 25)), ({"top_k": True}, (56, 47, 47)), ({"top_p": True}, (60, 53, 45))],
    ids=["all tokens", "top-k", "top-p"],
)
def test_drawing_from_the_likeliest_tokens_needs_the_memory_that_was_measured(active, llama, how, measured):
    """MB, 64 tokens of 131,072 in float32 at tp 1, 2 and 4 (bench/results/engine.md, recomputation and drawing)."""
    shape = llama(
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=64,
        vocab_size=131_072,
    )
    sizes = {"prompt_tokens": 1, "new_tokens": Lengths.fixed(1), "itemsize": 4, "device": preset("cpu-slot")}
    for tp, most in zip((1, 2, 4), measured, strict=True):
        planned = active("actor_generate", tp=tp, n_seqs=64, shape=shape, **sizes, **how)[0] / 1e6
        left = 17 if how else 0  # what the allocator keeps between two draws of many temporaries
        assert 0.98 * most < planned + left
        assert planned < 1.6 * most


@pytest.mark.parametrize("call", ["ref_inference", "actor_train"])
def test_a_pair_costs_what_a_group_of_two_does(ppo_cost, make_graph, assign, call):
    """Prompts of 768 tokens, answers of 256: 1,280 tokens of each pair are computed, 768 are repeated."""
    one = make_graph(n_seqs=512, mini_batches=4).call(call)
    pair, two = one.model_copy(update={"n_seqs": 256}), one.model_copy(update={"group_size": 2})
    of_pair = {"prompt_tokens": 2047, "new_tokens": Lengths.fixed(1), "recompute": "none", "answers": 2}
    of_two = {"prompt_tokens": 768, "new_tokens": Lengths.fixed(256), "recompute": "none"}
    eight = assign(list(range(8)), dp=8, micro_batches=2)
    shared, whole, group = (
        ppo_cost(CLUSTER, **workload).call(which, eight)
        for which, workload in (
            (pair, of_pair | {"shared_tokens": 768.0}),
            (pair, of_pair),
            (two, of_two),
        )
    )
    assert shared.seconds == pytest.approx(group.seconds, rel=0.02)
    assert shared.active_bytes == pytest.approx(group.active_bytes, rel=0.02)
    assert shared.seconds < 0.7 * whole.seconds
    few = ppo_cost(CLUSTER, **of_pair, shared_tokens=LEAST_SHARED - 1).call(pair, eight)
    assert few == whole


def test_pairs_without_their_prompt_fill_micro_batches_of_few_tokens(seconds):
    """Pairs of 1,024 tokens: six fit 4,096 tokens where 384 of each are computed once, four where none are."""
    sizes = {"prompt_tokens": 1023, "new_tokens": Lengths.fixed(1), "answers": 2, "n_seqs": 192}
    for shared, count in ((384.0, 4), (0.0, 6)):
        asked, as_many = (
            seconds("ref_inference", dp=8, shared_tokens=shared, **sizes, **limit)
            for limit in ({"micro_batch_tokens": 4096}, {"micro_batches": count})
        )
        assert asked == as_many


def test_more_micro_batches_need_less_memory(active):
    assert active("actor_train", micro_batches=4)[0] < active("actor_train", micro_batches=1)[0] / 3


def test_memory_is_that_of_the_fullest_micro_batch(active):
    """Shares of 5 sequences in 4 micro-batches hold 2 + 1 + 1 + 1: the fullest one as large as of 8 in 4."""
    for call, per_share in (("ref_inference", 1), ("actor_train", 4)):  # 4 mini-batches
        uneven, even = (active(call, n_seqs=per_share * share, micro_batches=4) for share in (5, 8))
        assert uneven == even
    # With 2 stages the first one keeps two at once, of 2 + 1 sequences: 3/4 of what it keeps of 2 + 2, and works on 2
    uneven, even, one = (
        active("actor_train", pp=2, n_seqs=4 * share, micro_batches=count)[0]
        for share, count in ((5, 4), (8, 4), (2, 1))
    )
    kept_of_two = even - one
    assert kept_of_two > 0
    assert uneven == pytest.approx(one + kept_of_two / 2)


def test_uneven_mini_batches_count_the_fullest(active):
    """10 sequences in 4 mini-batches: 3 in the fullest."""
    assert active("actor_train", n_seqs=10) == active("actor_train", n_seqs=12)


def test_uneven_groups_of_a_generation_count_the_fullest(active):
    """5 sequences in 2 groups decode as 3 and 2; the cache holds them all."""
    five, six = (active("actor_generate", pp=2, n_seqs=n)[0] for n in (5, 6))
    cache = 256 * 2 * 32 * 128 * 16 * 2  # of a sequence: tokens, keys and values, heads, width, layers, bf16
    assert six - five == pytest.approx(cache)


def test_the_first_stage_keeps_most_micro_batches(active):
    stages = active("actor_train", pp=4, micro_batches=8)
    assert stages[0] > stages[1] > stages[2]


def test_gradients_and_optimizer_are_shared_out_but_for_two_layers(ppo_cost, assign):
    model = ppo_cost(CLUSTER)
    one, eight = (model.training_bytes("actor", assign(list(range(dp)), dp).placement)[0] for dp in (1, 8))
    parameters = model.parameter_bytes("actor", assign([0]).placement)[0] / 2
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert one == parameters * (2 + 4 + 12)
    assert eight == parameters * (2 + (4 + 12) / 8) + 2 * layer * 4


def test_rows_that_several_ranks_hold_have_whole_gradients(ppo_cost, assign, llama):
    """One KV head on four tp ranks: keys and values; and tied embeddings on both ends of a pipeline."""
    placement = assign(list(range(8)), dp=2, tp=4).placement
    many, one = (
        ppo_cost(CLUSTER, shape=llama(num_key_value_heads=n)).training_bytes("actor", placement)[0]
        for n in (4, 1)
    )
    kv = 32 * 2 * 4096 * 128  # of the layers, and each rank has them in both models
    assert one - many == pytest.approx(kv * 4, rel=0.01)
    placement = assign([0, 1, 2, 3], dp=2, pp=2).placement
    untied, tied = (
        ppo_cost(CLUSTER, shape=llama(tie_word_embeddings=t)).training_bytes("actor", placement)
        for t in (False, True)
    )
    assert [b - a for a, b in zip(untied, tied, strict=True)] == [32000 * 4096 * 4] * 2


def test_a_device_hides_the_reduction_of_gradients_behind_its_backward_passes(seconds):
    device = preset("a100-80g-sxm")
    across = {"dp": 16, "micro_batches": 8, "n_seqs": 16384}
    hidden, seen = (
        seconds("actor_train", **across, device=device.model_copy(update={"exchange_overlap": share}))
        for share in (0.8, 0.0)
    )
    alone = seconds("actor_train", dp=1, micro_batches=8, n_seqs=1024)
    assert alone < hidden < 1.1 * alone
    reduction_s = 4 * 6.7e9 * 15 / 16 / (0.8 * 25e9)  # once, in each of 4 steps of 8 micro-batches
    assert seen - hidden == pytest.approx(32 * reduction_s, rel=0.2)


def test_training_adapters_computes_no_gradients_of_frozen_weights(ppo_cost, assign, make_graph, lora):
    """So it takes about two thirds of the passes, and next to nothing for the update."""
    call, one = make_graph(n_seqs=64).call("actor_train"), assign([0])
    whole_s, adapters_s = (
        ppo_cost(CLUSTER, recompute="none", lora=adapters).call(call, one).seconds
        for adapters in (None, lora)
    )
    assert 0.6 * whole_s < adapters_s < 0.72 * whole_s
    generate = make_graph(n_seqs=64).call("actor_generate")
    alone_s, beside_s = (ppo_cost(CLUSTER, lora=a).call(generate, one).seconds for a in (None, lora))
    assert alone_s < beside_s < 1.05 * alone_s


@pytest.mark.parametrize("call", ["ref_inference", "actor_train"])
def test_ranks_that_divide_tokens_take_a_little_longer_than_those_that_divide_sequences(seconds, call):
    """As many FLOPs a rank; besides, queries, keys, values and outputs go to the ranks of their heads and back."""
    alone, by_sequences, by_tokens = (
        seconds(call, n_seqs=64),
        seconds(call, dp=8, n_seqs=64),
        seconds(call, cp=8, n_seqs=64),
    )
    assert by_sequences < by_tokens < 1.2 * by_sequences < alone / 4


def test_the_cp_rank_with_all_of_a_short_answer_decides(ppo_cost, llama):
    """Shares of tokens are contiguous: of one micro-batch's counted tokens, which are at its end, the last rank has
    as many as it has tokens. Without cp, their share of all tokens passes the head."""
    local, workload = sizes(llama(), "lm", 1), ppo_cost(CLUSTER, counted_tokens=64).workload
    timing = Roofline(preset("a100-80g-sxm"), local, "lm", 1, False, 2)

    def counted(cp: int) -> float:
        here = ParallelStrategy(cp=cp), Crossings(False, False, False)
        return OnMesh(timing, workload, local, local, *here).counted(1000.0)

    assert counted(1) == 1000 * workload.counted_share < 1000
    assert counted(8) == 1000


def test_a_sequence_whose_tokens_are_divided_takes_a_part_of_the_memory_of_activations(
    active, ppo_cost, assign
):
    """One sequence for each mini-batch: more dp ranks would have nothing. The state is cut as over dp."""
    (alone,), (divided,) = active("actor_train", n_seqs=4), active("actor_train", cp=8, n_seqs=4)
    assert alone / 8 < divided < alone / 6
    model = ppo_cost(CLUSTER)
    devices = list(range(8))
    by_sequences, by_tokens = (assign(devices, **{axis: 8}).placement for axis in ("dp", "cp"))
    assert model.training_bytes("actor", by_sequences) == model.training_bytes("actor", by_tokens)


@pytest.mark.parametrize(
    ("name", "how", "message"),
    [
        (
            "actor_generate",
            {"cp": 2},
            "cp=2 divides the tokens of a sequence, but a generate call draws one after",
        ),
        (
            "actor_train",
            {"tp": 8, "cp": 8},
            "cp=8 exceeds the 4 query heads that a tp rank has of the model's 32",
        ),
    ],
)
def test_ranks_that_would_have_nothing_to_divide_are_refused(
    ppo_cost, assign, make_graph, name, how, message
):
    devices = list(range(how.get("tp", 1) * how["cp"]))
    with pytest.raises(ValueError, match=message):
        ppo_cost(Cluster(8, 8)).call(make_graph().call(name), assign(devices, **how))


def test_too_many_stages(ppo_cost, assign, llama, make_graph):
    model = ppo_cost(CLUSTER, shape=llama(num_hidden_layers=4))
    with pytest.raises(ValueError, match="pp=8 exceeds the model's 4 layers"):
        model.call(make_graph().call("actor_train"), assign(list(range(8)), pp=8))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_plausible(name):
    """Between hosts nothing is faster than inside one, and figures are in bytes and seconds."""
    device = preset(name)
    assert device.inside_host.bytes_per_s >= device.between_hosts.bytes_per_s
    assert 1e9 < device.memory_bytes < 1e12
    assert device.sources


def test_unknown_preset():
    with pytest.raises(ValueError, match="no device preset 'a100'; known are a100-40g-sxm"):
        preset("a100")
    with pytest.raises(ValueError, match="no device preset 'h100h100") as error:
        preset("h100" * 1000)
    assert len(str(error.value)) < 400


def test_ring_collectives():
    device = preset("h100-sxm")
    assert device.all_reduce_s(1e9, 1, False) == 0
    two, eight = (device.all_reduce_s(1e9, n, False) for n in (2, 8))
    assert two == pytest.approx(2 * 5e-6 + 1e9 / (450e9 * 0.8))
    assert two < eight < 2 * two


def test_python_rewards_cost_their_own_seconds_and_no_forward_pass(make_graph, ppo_cost, assign):
    """Each head scores its share one sequence after another, beside the reward model where there is one."""
    cluster = Cluster(1, 4)
    alone, beside = (make_graph(scoring_role=r).call("reward_inference") for r in ("ref", "reward"))
    ref = make_graph().call("ref_inference")
    two = assign([0, 1, 2, 3], dp=2, tp=2)
    free, slow = ppo_cost(cluster), ppo_cost(cluster, reward_s=1000.0)
    assert free.call(alone, two) == CallCost(0.0, (0.0,))
    assert slow.call(alone, two).seconds == alone.n_seqs / 2 * 1000
    assert free.call(beside, two).seconds > 0
    assert slow.call(beside, two).seconds == slow.call(alone, two).seconds
    assert slow.call(ref, two) == free.call(ref, two)


WEIGHTS_7B = 2 * (
    32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 11008 + 2 * 4096) + 2 * 32000 * 4096 + 4096
)
"""Bytes in bfloat16 of a Llama of 32 layers with 8 KV heads of 128: query and output, keys and values, MLP, norms."""


@pytest.mark.parametrize(("dp", "tp", "pp"), [(8, 1, 1), (1, 8, 1), (2, 2, 2)])
def test_another_engine_has_a_copy_of_the_weights_and_its_own_keys_and_values(
    active, llama, lora, dp, tp, pp
):
    """On GPUs each device of a replica has its part of the weights, and reads ours where they are; merged weights are
    copies."""
    vllm = OtherEngine(copies=2, kv_bytes=10**9)
    stages = active("actor_generate", dp, tp, pp, shape=llama(num_key_value_heads=8), other=vllm)
    assert stages == pytest.approx((WEIGHTS_7B / (tp * pp) + 10**9,) * pp)
    merged = active("actor_generate", dp, tp, pp, shape=llama(num_key_value_heads=8), other=vllm, lora=lora)
    assert merged == pytest.approx((2 * WEIGHTS_7B / (tp * pp) + 10**9,) * pp)
    server = OtherEngine(copies=2)
    assert active("actor_generate", dp, tp, pp, other=server) == (0.0,) * pp, "it is on another machine"
    ours = active("ref_inference", dp, tp, pp)
    assert active("ref_inference", dp, tp, pp, other=vllm) == ours, "it only draws"


def test_on_a_host_without_gpus_another_engine_is_beside_the_head(active, llama):
    """Its weights, the memory in which they are handed over, and the keys and values of its four ranks."""
    of_cpu = {"device": preset("cpu-slot"), "shape": llama(num_key_value_heads=8), "n_seqs": 8}
    vllm = OtherEngine(copies=2, kv_bytes=10**9)
    assert active("actor_generate", 1, 2, 2, other=vllm, **of_cpu) == (2 * WEIGHTS_7B + 4 * 10**9, 0.0)


def test_another_engine_draws_in_parts_what_its_keys_and_values_have_no_room_for(seconds, llama):
    """A token has 2 x 32 layers x 8 heads x 128 x 2 bytes = 131,072, a sequence of 256 tokens 2^25. On one device are
    64 sequences: at once with 2^31 bytes, in two parts with 2^30. Handing 15 GB over takes 4 passes in GPU memory."""
    shape = {"shape": llama(num_key_value_heads=8), "n_seqs": 64}
    ours = [seconds("actor_generate", micro_batches=count, **shape) for count in (1, 2)]
    theirs = [
        seconds("actor_generate", micro_batches=micro, other=OtherEngine(copies=2, kv_bytes=size), **shape)
        for size, micro in ((2**31, 1), (2**30, 1), (2**30, 16))
    ]
    take_s = 4 * WEIGHTS_7B / preset("a100-80g-sxm").memory_bytes_per_s
    assert theirs[0] == pytest.approx(ours[0] + take_s)
    assert theirs[1] == theirs[2] == pytest.approx(ours[1] + take_s)
    assert ours[1] > 1.2 * ours[0]


def test_a_generation_in_parts_and_an_evaluation_in_batches_hand_the_weights_over_once(
    ppo_cost, make_graph, assign
):
    """The server draws as fast as the ranks; handing 13 GB over takes 4 passes at 25 GB/s."""
    evaluation = EvaluationWork(
        every=1, rows=64, rows_at_once=8, answers=1, prompt_tokens=64, new_tokens=64, completion_tokens=0
    )
    ours, theirs = (
        ppo_cost(CLUSTER, evaluation=evaluation, other=other) for other in (None, OtherEngine(copies=2))
    )
    call, one = make_graph(n_seqs=64).call("actor_generate"), assign([0])
    part = call.model_copy(update={"chunks": 4})
    take_s = theirs.call(call, one).seconds - ours.call(call, one).seconds
    assert take_s == pytest.approx(4 * 2 * 6.74e9 / 25e9, rel=0.01)
    assert theirs.call(part, one).seconds - ours.call(part, one).seconds == pytest.approx(take_s / 4)
    evaluations = [model.evaluation("actor", one.placement).seconds for model in (ours, theirs)]
    assert evaluations[1] - evaluations[0] == pytest.approx(take_s)


def test_ranks_beyond_the_kv_heads_have_copies_of_keys_and_values(seconds, llama):
    """A token of 2 heads has 2 x 32 layers x 128 x 2 bytes for each of them, a sequence of 256 tokens 2^22; so on
    each of 4 ranks. 64 sequences are drawn at once with 2^28 bytes, in two parts with 2^27."""
    shape = {"shape": llama(num_key_value_heads=2), "n_seqs": 64, "tp": 4}
    one, two = (
        seconds("actor_generate", other=OtherEngine(copies=2, kv_bytes=size), **shape)
        for size in (2**28, 2**27)
    )
    ours = [seconds("actor_generate", micro_batches=count, **shape) for count in (1, 2)]
    assert two - one == pytest.approx(ours[1] - ours[0])
    assert ours[1] > 1.05 * ours[0]
