"""A model's work by hand."""

from dataclasses import replace

from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import Lora
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from prefect_rlhf.rlhf_tasks.parallel.layout.work import (
    BLOCK,
    blocks_of,
    generation_flops,
    pass_flops,
    pool_of,
    rows_of,
    shared_blocks,
)

SHAPE = ModelShape(
    "llama", hidden=8, layers=2, query_heads=2, kv_heads=2, head_dim=4, intermediate=8, vocab=16, context=32
)
LAYER = 4 * 8 * 8 + 3 * 8 * 8 + 2 * 8  # attention's four matrices, the MLP's three, two norms
ATTENDED = 5  # by each of ten tokens, on average
LAYERS = 2 * (2 * 10 * LAYER + 4 * 10 * ATTENDED * 8)  # of ten tokens


def test_a_forward_pass_is_two_operations_per_parameter_and_token_and_attention():
    assert pass_flops(SHAPE, "lm", [10]) == LAYERS + 2 * 10 * 8 * 16 == 24_320
    assert pass_flops(SHAPE, "scalar", [10]) == LAYERS + 2 * 10 * 8
    assert pass_flops(SHAPE, "lm", [10, 10, 10]) == 3 * 24_320
    assert pass_flops(SHAPE, "lm", []) == 0


def test_attention_alone_grows_with_the_square_of_the_length():
    quadratic = 4 * 20 * 10 * 8 * 2
    assert pass_flops(SHAPE, "lm", [20]) == 2 * (24_320 - 4 * 10 * 5 * 8 * 2) + quadratic


def test_a_token_costs_the_experts_that_it_is_given_to():
    mixture = replace(SHAPE, family="mixtral", experts=8, experts_per_token=3)
    router, expert = 8 * 8, 3 * 8 * 8
    layer = LAYER + 2 * expert + router
    assert pass_flops(mixture, "lm", [10]) == 24_320 + 2 * 2 * 10 * (layer - LAYER)
    assert pass_flops(mixture, "lm", [10], training=True) == 3 * pass_flops(mixture, "lm", [10])


def test_generation_needs_no_pass_of_the_last_token_and_logits_of_new_tokens_only():
    """A prompt of 6 with 4 new tokens: 9 go through the layers, attending to 4.5."""
    layers = 2 * (2 * 9 * LAYER + 4 * 9 * 4.5 * 8)
    assert generation_flops(SHAPE, [10], new_tokens=4) == layers + 2 * 4 * 8 * 16 == 20_320


def test_training_is_three_passes_and_with_adapters_without_the_gradients_of_frozen_matrices():
    """Adapters of rank 1 on two 8 x 8 matrices of each of two layers."""
    assert pass_flops(SHAPE, "lm", [10], training=True) == 3 * 24_320
    lora, adapters = Lora(1, 1.0, ("q_proj", "up_proj")), 2 * 10 * 2 * 2 * (8 + 8)
    assert pass_flops(SHAPE, "lm", [10], lora=lora) == 24_320 + adapters
    frozen = 2 * 10 * (2 * LAYER + 8 * 16)
    assert pass_flops(SHAPE, "lm", [10], lora=lora, training=True) == 3 * (24_320 + adapters) - frozen
    spared = 3 * 2 * 6 * 8 * 16 - 2 * 6 * 8 * 16  # six tokens that do not pass the head
    assert pass_flops(SHAPE, "lm", [10], 4, lora, training=True) == 3 * (24_320 + adapters) - frozen - spared
    scalar = 3 * pass_flops(SHAPE, "scalar", [10], lora=lora) - 2 * 10 * 2 * LAYER  # its head trains
    assert pass_flops(SHAPE, "scalar", [10], lora=lora, training=True) == scalar


def test_a_cache_has_a_part_of_what_all_take_and_room_for_any_one():
    assert [blocks_of(columns) for columns in (1, BLOCK, BLOCK + 1)] == [1, 1, 2]
    assert [shared_blocks(prompt) for prompt in (1, BLOCK, BLOCK + 1, 3 * BLOCK)] == [0, 0, 1, 2]
    assert [pool_of(100, 30, micro_batches) for micro_batches in (1, 3, 8)] == [100, 34, 30]


def test_most_sequences_at_a_time():
    assert [rows_of(100, micro_batches, False) for micro_batches in (1, 4, 10, 100)] == [100, 100, 40, 4]
    assert rows_of(100, 10, True) == 10, "a state is as large for a short sequence"
