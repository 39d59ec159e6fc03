import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Interval, Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement


def model(query=6, kv=2, layers=4, **changes) -> ModelShape:
    sizes = {
        "hidden": 8,
        "layers": layers,
        "query_heads": query,
        "kv_heads": kv,
        "head_dim": 2,
        "intermediate": 10,
        "vocab": 17,
    }
    return ModelShape(family="qwen3", context=64, qk_norm="each head", **{**sizes, **changes})


def layout(shape: ModelShape, dp=1, tp=1, pp=1, head="lm", first=0) -> Layout:
    strategy = ParallelStrategy(dp, tp, pp)
    return Layout(shape, head, Placement(tuple(range(first, first + strategy.size)), strategy))


@st.composite
def layouts(draw) -> Layout:
    kv = draw(st.integers(1, 4))
    shape = model(
        query=kv * draw(st.integers(1, 4)),
        kv=kv,
        layers=draw(st.integers(1, 6)),
        intermediate=draw(st.integers(4, 11)),
        tied=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
    )
    degrees = st.integers(1, 3)
    tp = min(draw(st.integers(1, 4)), shape.query_heads)
    pp = min(draw(degrees), shape.layers)
    return layout(
        shape, draw(degrees), tp, pp, draw(st.sampled_from(["lm", "scalar"])), draw(st.integers(0, 3))
    )


@given(layouts())
def test_the_devices_of_a_dp_rank_hold_every_row_and_count_each_once(lay: Layout):
    for dp_rank in range(lay.placement.strategy.dp):
        held = {spec.name: set() for spec in lay.parameters}
        counted = {spec.name: [] for spec in lay.parameters}
        for device in lay.placement.replica(dp_rank):
            primary = lay.primary(device)
            for name, rows in lay.held(device).items():
                held[name] |= set(range(*rows))
                counted[name] += range(*primary[name])
                assert set(range(*primary[name])) <= set(range(*rows))
        for spec in lay.parameters:
            assert held[spec.name] == set(range(spec.length))
            assert sorted(counted[spec.name]) == list(range(spec.length))


@given(layouts())
def test_holders_are_the_devices_that_hold(lay: Layout):
    for dp_rank in range(lay.placement.strategy.dp):
        held = {device: lay.held(device) for device in lay.placement.replica(dp_rank)}
        for name in lay.specs:
            holders = {device: rows[name] for device, rows in held.items() if name in rows}
            assert dict(lay.holders(name, dp_rank)) == holders


@given(layouts())
def test_a_rank_holds_the_kv_heads_of_its_query_heads_and_no_others(lay: Layout):
    group = lay.shape.query_heads // lay.shape.kv_heads
    for tp_rank in range(lay.placement.strategy.tp):
        local = lay.kv_head_map(tp_rank)
        kv = lay.units("kv_head", tp_rank)
        queries = range(*lay.units("query_head", tp_rank))
        assert [kv.start + index for index in local] == [head // group for head in queries]
        assert set(local) == set(range(kv.size))


@given(layouts())
def test_shared_pieces_join_exactly_the_copies_inside_a_dp_rank(lay: Layout):
    """Summing over a piece's devices reaches, for each row, all of its holders."""
    for dp_rank in range(lay.placement.strategy.dp):
        replica = lay.placement.replica(dp_rank)
        for name, spec in lay.specs.items():
            listed = {row: s.devices for s in lay.shared(name, dp_rank) for row in range(*s.interval)}
            for row in range(spec.length):
                holders = tuple(
                    d for d in replica if name in lay.held(d) and row in range(*lay.held(d)[name])
                )
                assert listed.get(row) == (holders if len(holders) > 1 else None)


def test_uneven_heads_share_a_kv_head():
    """SmolLM2's 9 query heads on 3 KV heads at tp=2: both ranks need KV head 1."""
    lay = layout(model(query=9, kv=3), tp=2)

    assert [lay.units("query_head", t) for t in (0, 1)] == [(0, 4), (4, 9)]
    assert [lay.units("kv_head", t) for t in (0, 1)] == [(0, 2), (1, 3)]
    assert lay.kv_head_map(1) == (0, 0, 1, 1, 1)
    (shared,) = lay.shared("model.layers.0.self_attn.k_proj.weight", 0)
    assert shared[1:] == (Interval(2, 4), (0, 1))


def test_tied_embeddings_live_on_both_ends():
    lay = layout(model(tied=True), dp=2, tp=2, pp=3)
    name = "model.embed_tokens.weight"

    assert [device for device, _ in lay.holders(name, 0)] == [0, 1, 8, 9]
    assert "lm_head.weight" not in lay.specs
    assert [s.devices for s in lay.shared(name, 1)] == [(2, 10), (3, 11)]


def test_a_value_head_replaces_the_language_model_head():
    lay = layout(model(tied=True), tp=2, pp=2, head="scalar")

    assert lay.specs["score.weight"].shape == (1, 8)
    assert [device for device, _ in lay.holders("score.weight", 0)] == [2, 3]
    assert [device for device, _ in lay.holders("model.embed_tokens.weight", 0)] == [0, 1]


def test_sizes_of_slices():
    lay = layout(model(query=9, kv=3), tp=2)

    assert lay.slice_shape("model.layers.0.self_attn.o_proj.weight", 1) == (8, 10)
    assert lay.slice_shape("model.layers.0.mlp.down_proj.weight", 0) == (8, 5)


@pytest.mark.parametrize(
    ("strategy", "changes", "message"),
    [
        (
            ParallelStrategy(cp=7),
            {},
            "cp=7 exceeds the 6 query heads that a tp rank has of the model's 6 .tp=1",
        ),
        (ParallelStrategy(tp=4, cp=2), {}, "cp=2 exceeds the 1 query heads that a tp rank has .* .tp=4"),
        (
            ParallelStrategy(cp=2),
            {"kinds": ("convolution", "attention"), "kernel": 3},
            "qwen3 has layers that pass a state from token to token .convolution.. Leave out cp",
        ),
    ],
    ids=["heads", "heads of a tp rank", "states"],
)
def test_ranks_divide_tokens_only_where_each_can_attend(strategy, changes, message):
    with pytest.raises(ValueError, match=message):
        Layout(model(**changes), "lm", Placement(tuple(range(strategy.size)), strategy))


@pytest.mark.parametrize(("axis", "degree"), [("tp", 7), ("pp", 5)])
def test_an_empty_rank_is_refused(axis, degree):
    with pytest.raises(ValueError, match=f"{axis}={degree} exceeds"):
        layout(model(), **{axis: degree})
