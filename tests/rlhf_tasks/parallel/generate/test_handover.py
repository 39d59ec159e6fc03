"""Weights in memory that processes share: what a reader finds there is what files would hold."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets
from prefect_rlhf.rlhf_tasks.parallel.comm.shared_weights import (
    Place,
    SharedWeights,
    digest_of_all,
    read_places,
)
from prefect_rlhf.rlhf_tasks.parallel.generate.handover import Handover
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from tests.rlhf_tasks.parallel.comm.test_reallocation import cut, whole_model
from tests.rlhf_tasks.roles_in_layouts import ADAPTERS, model, place

CPU = torch.device("cpu")


def engine_of(layout: Layout, groups: ProcessGroups, whole: dict[str, torch.Tensor], version: int) -> Any:
    """What `Handover.write` reads of an engine."""
    rank, placement = groups.rank, layout.placement
    at = placement.coordinate(rank)
    base = {name: t for name, t in whole.items() if name in layout.whole.specs}
    adapters = {name: t for name, t in whole.items() if name in layout.specs} if layout.lora else {}
    stage = SimpleNamespace(
        layout=layout.whole,
        dtype=next(iter(whole.values())).dtype,
        holder=rank,
        named_slices=lambda: cut(base, layout.whole, rank),
        trained_slices=lambda: cut(adapters, layout, rank),
    )
    return SimpleNamespace(
        layout=layout,
        stage=stage,
        placement=placement,
        groups=groups,
        device=CPU,
        coordinate=at,
        version=version,
        is_head=rank in placement.heads,
    )


def read(handed) -> dict[str, torch.Tensor]:
    memory = SharedWeights(handed["size"], handed["path"])
    places = read_places(handed["places"])
    assert memory.digests(places) == handed["digests"]
    assert digest_of_all(handed["digests"]) == handed["digest"]
    there = {n: t.clone() for n, t in memory.tensors(places, getattr(torch, handed["dtype"])).items()}
    memory.close()
    return there


def handed_over(rank, world, shape, placements, dtype) -> list[str]:
    """The placements in which a head's memory had not the whole model, after one version and after another."""
    wrong = []
    for placement in placements:
        groups = ProcessGroups(device_sets(placement), 240.0, CPU)
        if rank not in placement.devices:
            continue
        layout, handover = Layout(shape, "lm", placement), Handover()
        whole = whole_model(shape, "lm", dtype)
        for version in (3, 4):
            whole = {name: tensor.flip(0) for name, tensor in whole.items()}
            handed = handover.write(engine_of(layout, groups, whole, version))
            if handed is None:
                continue
            there = read(handed)
            same = handed["version"] == version and there.keys() == {
                name for spec in layout.parameters for name in spec.stored
            }
            for spec in layout.parameters:
                pieces = whole[spec.name].unbind() if spec.stacked else [whole[spec.name]]
                for name, piece in zip(spec.stored, pieces, strict=True):
                    bits = (there[name].flatten().view(torch.uint8), piece.flatten().view(torch.uint8))
                    same = same and (spec.packed is not None or torch.equal(*bits))
            wrong += [] if same else [f"{placement} version {version}"]
        handover.close()
    return wrong


@pytest.mark.dist
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (model(), torch.float32),
        (model(tied=True), torch.bfloat16),
        (model(family="qwen3_moe", experts=3, experts_per_token=2), torch.float32),
    ],
    ids=["lm", "tied-bf16", "experts"],
)
def test_each_rank_hands_over_its_slices_and_the_reader_finds_the_whole_model(ranks, shape, dtype):
    layouts = [place([0]), place([1, 0], tp=2), place([2, 3], pp=2), place(range(4), dp=2, tp=2)]
    assert ranks.run(4, handed_over, shape, layouts, dtype) == [[]] * 4


def merged_adapters(rank, world) -> float:
    """The largest difference from W + alpha / rank * B A, at tp = 2."""
    layout = Layout(model(), "lm", place([0, 1], tp=2), ADAPTERS)
    groups = ProcessGroups(device_sets(layout.placement), 240.0, CPU)
    generator = torch.Generator().manual_seed(3)
    specs = {**layout.whole.specs, **layout.specs}
    whole = {name: torch.randn(spec.shape, generator=generator) for name, spec in specs.items()}
    handed = Handover().write(engine_of(layout, groups, whole, 0))
    if handed is None:
        return 0.0
    worst, there = 0.0, read(handed)
    for name, tensor in there.items():
        expected, module = whole[name], name.removesuffix(".weight")
        if f"{module}.lora_A.weight" in whole:
            halves = (whole[f"{module}.lora_{half}.weight"] for half in "BA")
            expected = expected + ADAPTERS.alpha / ADAPTERS.rank * torch.matmul(*halves)
            assert not torch.allclose(expected, whole[name])
        worst = max(worst, float((tensor - expected).abs().max()))
    return worst


@pytest.mark.dist
def test_adapters_are_added_to_the_weights_below_them(ranks):
    assert max(ranks.run(2, merged_adapters)) < 1e-5


def test_a_digest_tells_any_bit_and_any_two_words_that_change_places():
    memory = SharedWeights(1 << 16)
    words = memory.bytes.view(torch.int64)
    words.copy_(torch.arange(len(words)))
    places = [Place("one", (8192,), 0), Place("other", (8192,), 1 << 15)]
    known = memory.digests(places)
    words[[7, 9]] = words[[9, 7]]
    swapped = memory.digests(places)
    memory.bytes[-1] ^= 1
    flipped = memory.digests(places)
    assert [name for name in known if known[name] != swapped[name]] == ["one"]
    assert [name for name in known if swapped[name] != flipped[name]] == ["other"]
    assert len(set(map(digest_of_all, (known, swapped, flipped)))) == 3
    memory.close()
