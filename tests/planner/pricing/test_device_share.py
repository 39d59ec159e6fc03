import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.pricing.device_share import sizes
from rlhf_tasks.parallel.layout.shape import ModelShape
from rlhf_tasks.parallel.layout.slices import Layout
from rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement


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


@given(st.integers(1, 6), st.integers(1, 5), st.booleans(), st.sampled_from(["lm", "scalar"]))
def test_no_device_holds_more_than_its_stage_and_one_holds_as_much(tp, pp, tied, head):
    """The layout's own count, device by device, is the judge."""
    placement = Placement(tuple(range(tp * pp)), ParallelStrategy(1, tp, pp))
    layout = Layout(shape(tied=tied), head, placement)
    local = sizes(shape(tied=tied), head, tp)
    for stage in range(pp):
        held = [layout.size_bytes(placement.device(0, rank, stage), 1) for rank in range(tp)]
        bound = local.stage_parameters(pp, stage)
        assert max(held) <= bound
        if 6 % tp == 40 % tp == 50 % tp == 0:
            assert max(held) == bound


def test_grouped_queries_are_not_counted_as_full_heads():
    grouped, full = sizes(shape(), "lm", 2), sizes(shape(kv_heads=6), "lm", 2)
    assert (grouped.kv, full.kv) == (4, 12)
    assert full.layer - grouped.layer == 2 * (12 - 4) * 24


def test_a_scalar_head_has_no_vocabulary():
    assert sizes(shape(), "scalar", 2).vocab == 1
    assert sizes(shape(), "lm", 2).vocab == 25


def test_too_many_tp_ranks():
    with pytest.raises(ValueError, match="tp=7 exceeds the model's 6 query heads"):
        sizes(shape(), "lm", 7)
