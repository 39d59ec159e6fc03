from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.planner.pricing.devices import preset
from prefect_rlhf.planner.pricing.rooflines import Roofline, sizes, stage_sizes
from prefect_rlhf.rlhf_tasks.parallel.layout.family import DeltaHeads
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement


def shape(**changes) -> ModelShape:
    small = {
        "family": "llama",
        "hidden": 24,
        "layers": 5,
        "query_heads": 6,
        "kv_heads": 2,
        "head_dim": 4,
        "intermediate": 40,
        "vocab": 50,
        "context": 64,
    }
    return ModelShape(**{**small, **changes})


GPT2 = {
    "family": "gpt2",
    "kv_heads": 6,
    "norm_bias": True,
    "learned_positions": True,
    "gated": False,
    "packed": ("qkv",),
}
MIXTURE = {"family": "mixtral", "experts": 8, "experts_per_token": 2}


@given(
    st.integers(1, 6),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from(["lm", "scalar"]),
    st.sampled_from([{}, MIXTURE, GPT2]),
)
def test_no_device_holds_more_than_its_stage_and_one_holds_as_much(tp, pp, tied, head, more):
    """The layout's own count, device by device, is the judge."""
    placement = Placement(tuple(range(tp * pp)), ParallelStrategy(1, tp, pp))
    layout = Layout(shape(tied=tied, **more), head, placement)
    local = sizes(shape(tied=tied, **more), head, tp)
    for stage in range(pp):
        slices = [layout.held(placement.device(0, rank, stage)) for rank in range(tp)]
        held = [sum(rows.size * layout.specs[name].row_size for name, rows in own.items()) for own in slices]
        bound = local.stage_parameters(pp, stage)
        assert max(held) <= bound
        if 6 % tp == 40 % tp == 50 % tp == 0:
            assert max(held) == bound


def test_grouped_queries_are_not_counted_as_full_heads():
    grouped, full = sizes(shape(), "lm", 2), sizes(shape(kv_heads=6), "lm", 2)
    assert (grouped.kv, full.kv) == (4, 12)
    assert full.layer - grouped.layer == 2 * (12 - 4) * 24


def test_a_token_passes_its_experts_and_a_pass_reads_those_of_its_tokens():
    local, expert = sizes(shape(**MIXTURE), "lm", 2), 3 * 20 * 24
    rest = sizes(shape(), "lm", 2).layer - expert + 8 * 24  # and the router
    assert (local.layer, local.active) == (rest + 8 * expert, rest + 2 * expert)
    assert local.read(1) == pytest.approx(local.active)
    assert local.read(2) == pytest.approx(rest + (2 + 6 * 2 / 8) * expert)
    assert local.read(1000) == pytest.approx(local.layer)
    assert (local.busy(1), local.busy(2)) == (pytest.approx(2), pytest.approx(8 * (1 - 0.75**2)))
    dense = sizes(shape(), "lm", 2)
    assert dense.active == dense.read(1) == dense.layer


def test_a_scalar_head_has_no_vocabulary():
    assert sizes(shape(), "scalar", 2).vocab == 1
    assert sizes(shape(), "lm", 2).vocab == 25


def test_too_many_tp_ranks():
    with pytest.raises(ValueError, match="tp=7 exceeds the model's 6 query heads"):
        sizes(shape(), "lm", 7)


def test_a_decoding_step_moves_states_in_float32_a_dozen_times_whatever_the_weights_are():
    kinds = {"family": "qwen3_5_text", "kinds": ("delta",), "kernel": 4}
    with_states = sizes(shape(**kinds, delta=DeltaHeads(2, 2, 128, 128)), "lm", 1)
    device = preset("a100-80g-sxm")
    steps = [
        Roofline(device, local, "lm", 1, False, 2).layer_s("decode", 10_000, 100)
        for local in (with_states, replace(with_states, state=0))
    ]
    states_s = 10_000 * 2 * 2 * 128 * 128 * 4 * 12 / device.memory_bytes_per_s
    assert states_s < steps[0] - steps[1] < 1.5 * states_s


def test_a_pass_over_sequences_moves_states_eight_times_for_each_chunk():
    kinds = {"family": "qwen3_5_text", "kinds": ("delta",), "kernel": 4}
    with_states = sizes(shape(**kinds, delta=DeltaHeads(2, 2, 128, 128)), "lm", 1)
    device = preset("a100-80g-sxm")
    for kind, passes in (("prefill", 1), ("forward", 1), ("backward", 2)):
        seconds = [
            Roofline(device, local, "lm", 1, False, 2).layer_s(kind, 640_000, 64)
            for local in (with_states, replace(with_states, state=0))
        ]
        elements = (
            2 * 2 * 128 * 128 + (2 * 2 * 128 + 2 * 2 * 128) * 3
        )  # of 4 value heads; three inputs of a channel
        states_s = passes * 10_000 * elements * 4 * 8 / device.memory_bytes_per_s
        assert states_s < seconds[0] - seconds[1] < 1.5 * states_s


UNLIKE = {
    "convolutions": {"family": "lfm2", "kinds": ("convolution", "convolution", "attention"), "kernel": 3},
    "delta": {
        "family": "qwen3_5_text",
        "kinds": ("delta", "attention"),
        "kernel": 4,
        "delta": DeltaHeads(2, 3, 4, 8),
    },
    "some dense": {
        "family": "glm4_moe",
        "experts": 4,
        "experts_per_token": 2,
        "dense_layers": (0, 1),
        "dense_columns": 100,
    },
}


@pytest.mark.parametrize("kind", UNLIKE)
@pytest.mark.parametrize("pp", [2, 3, 5])
def test_a_stage_of_unlike_layers_has_what_these_have(kind, pp):
    """The layout's own count is the judge. The mean layer is rounded up."""
    model = shape(**UNLIKE[kind])
    layout = Layout(model, "lm", Placement(tuple(range(pp)), ParallelStrategy(1, 1, pp)))
    stages = stage_sizes(model, "lm", 1, pp)
    for stage, its in enumerate(stages):
        held = sum(rows.size * layout.specs[name].row_size for name, rows in layout.held(stage).items())
        assert held <= its.stage_parameters(pp, stage) < held + its.stage_layers(pp, stage)
    assert len(set(stages)) > 1
