"""Weights in memory that processes share: what a reader finds there is what files would hold."""

import ctypes
import json
import os
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefect_rlhf.rlhf_tasks.parallel.comm import shared_weights
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, all_reduce, device_sets
from prefect_rlhf.rlhf_tasks.parallel.comm.shared_weights import (
    HostMemory,
    Lent,
    assembled,
    described,
    digest_of_all,
    digests_of,
    opened,
    opening,
    parts_of,
)
from prefect_rlhf.rlhf_tasks.parallel.generate.beside import GenerationFault
from prefect_rlhf.rlhf_tasks.parallel.generate.handover import CPU, Handover
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Interval, Layout
from prefect_rlhf.rlhf_tasks.parallel.model.weights import stored_rows
from tests.rlhf_tasks.parallel.comm.test_reallocation import cut, whole_model
from tests.rlhf_tasks.roles_in_layouts import ADAPTERS, model, place
from tests.tiny_models import shape_of, tiny_config


class LentOnHost(Lent):
    """In place of CUDA's handles a file descriptor: torch lets others open the memory of a tensor where it is."""

    def where(self, tensor: torch.Tensor) -> dict[str, Any]:
        file, size = tensor.untyped_storage()._share_fd_cpu_()
        self._lent.append((tensor, ()))
        return {"path": f"/proc/{os.getpid()}/fd/{file}", "size": size}

    def take_back(self) -> None:
        self._lent.clear()


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


def handover_of(lends: bool) -> Handover:
    handover = Handover()
    handover.lent = LentOnHost() if lends else handover.lent
    return handover


def read(handed) -> dict[str, torch.Tensor]:
    handed = json.loads(json.dumps(handed))
    parts = parts_of(handed)
    assert digests_of(parts) == handed["digests"]
    assert digest_of_all(handed["digests"]) == handed["digest"]
    return {name: tensor.clone() for name, tensor in assembled(parts, handed["shapes"], CPU)}


def handed_over(rank, world, shape, placements, dtype, lends) -> list[str]:
    """The placements of which a head's reader found not the whole model, after one version and after another."""
    wrong = []
    for placement in placements:
        groups = ProcessGroups(device_sets(placement), 240.0, CPU)
        if rank not in placement.devices:
            continue
        layout, handover = Layout(shape, "lm", placement), handover_of(lends)
        whole = whole_model(shape, "lm", dtype)
        for version in (3, 4):
            whole = {name: tensor.flip(0) for name, tensor in whole.items()}
            handed = handover.write(engine_of(layout, groups, whole, version), lends)
            there = {} if handed is None else read(handed)
            all_reduce(torch.ones(1), groups[placement.replica(placement.coordinate(rank).dp)])  # it was read
            if handed is None:
                continue
            same = handed["version"] == version and there.keys() == {
                name for spec in layout.parameters for name in spec.stored
            }
            for spec in layout.parameters:
                found = stored_rows(there.__getitem__, spec, Interval(0, spec.length))
                bits = (each.contiguous().flatten().view(torch.uint8) for each in (found, whole[spec.name]))
                same = same and torch.equal(*bits)
            wrong += [] if same else [f"{placement} version {version}"]
        handover.close()
    return wrong


@pytest.mark.dist
@pytest.mark.parametrize("lends", [False, True], ids=["copied", "lent"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (model(), torch.float32),
        (model(tied=True), torch.bfloat16),
        (model(family="qwen3_moe", experts=3, experts_per_token=2), torch.float32),
        (shape_of(tiny_config("phi3")), torch.bfloat16),
        (shape_of(tiny_config("gpt2")), torch.float32),
        (shape_of(tiny_config("gpt_oss")), torch.bfloat16),
    ],
    ids=["lm", "tied-bf16", "experts", "fused", "fused-transposed", "experts-in-turns"],
)
def test_each_rank_hands_over_its_slices_and_the_reader_finds_the_whole_model(ranks, shape, dtype, lends):
    layouts = [place([0]), place([1, 0], tp=2), place([2, 3], pp=2), place(range(4), cp=2, tp=2)]
    layouts.append(place(range(4), dp=2, tp=2))
    assert ranks.run(4, handed_over, shape, layouts, dtype, lends) == [[]] * 4


def merged_adapters(rank, world, lends) -> float:
    """The largest difference from W + alpha / rank * B A, at tp = 2."""
    layout = Layout(model(), "lm", place([0, 1], tp=2), ADAPTERS)
    groups = ProcessGroups(device_sets(layout.placement), 240.0, CPU)
    generator = torch.Generator().manual_seed(3)
    specs = {**layout.whole.specs, **layout.specs}
    whole = {name: torch.randn(spec.shape, generator=generator) for name, spec in specs.items()}
    handover = handover_of(lends)
    handed = handover.write(engine_of(layout, groups, whole, 0), lends)
    worst, there = 0.0, {} if handed is None else read(handed)
    all_reduce(torch.ones(1), groups[(0, 1)])  # it was read
    for name, tensor in there.items():
        expected, module = whole[name], name.removesuffix(".weight")
        if f"{module}.lora_A.weight" in whole:
            halves = (whole[f"{module}.lora_{half}.weight"] for half in "BA")
            expected = expected + ADAPTERS.alpha / ADAPTERS.rank * torch.matmul(*halves)
            assert not torch.allclose(expected, whole[name])
        worst = max(worst, float((tensor - expected).abs().max()))
    return worst


@pytest.mark.dist
@pytest.mark.parametrize("lends", [False, True], ids=["copied", "lent"])
def test_adapters_are_added_to_the_weights_below_them(ranks, lends):
    assert max(ranks.run(2, merged_adapters, lends)) < 1e-5


def lent_in_place(rank, world) -> bool:
    """Whether a reader sees a weight as it is now, and not as it was when it was lent."""
    layout, whole = Layout(model(), "lm", place([0])), whole_model(model(), "lm", torch.float32)
    handover, engine = handover_of(lends=True), engine_of(layout, ProcessGroups([(0,)], 240.0, CPU), whole, 0)
    slices = engine.stage.named_slices()
    engine.stage.named_slices = lambda: slices
    handed = handover.write(engine, lends=True)
    name, weight = "model.norm.weight", slices["model.norm.weight"]
    weight.fill_(3.0)
    assert handed is not None
    parts = parts_of(handed)
    return digests_of(parts) != handed["digests"] and torch.equal(parts[name][0][1], weight)


@pytest.mark.dist
def test_what_is_lent_is_not_copied(ranks):
    assert ranks.run(1, lent_in_place) == [True]


def test_a_tensor_of_which_a_part_is_missing_is_refused():
    parts = {"a": [((slice(0, 2, 1),), torch.ones(2))]}
    with pytest.raises(ValueError, match="a has 3 numbers, and 2 were handed over"):
        list(assembled(parts, {"a": [3]}, CPU))


@pytest.mark.parametrize(
    ("first", "second", "whole"),
    [
        (slice(0, 2, 1), slice(0, 2, 1), False),
        (slice(0, 2, 1), slice(1, 3, 1), False),
        (slice(0, 3, 2), slice(2, 5, 2), False),
        (slice(0, 2, 1), slice(2, 4, 1), True),
        (slice(0, 3, 2), slice(1, 4, 2), True),
    ],
    ids=str,
)
def test_parts_that_overlap_are_refused_though_they_have_as_many_numbers(first, second, whole):
    """Each has half of a tensor's rows. What no part covers would be whatever was in memory."""
    parts = {"a": [((rows, slice(0, 3, 1)), torch.full((2, 3), i)) for i, rows in enumerate((first, second))]}
    if whole:
        ((_, tensor),) = assembled(parts, {"a": [4, 3]}, CPU)
        assert tensor.sum() == 6
    else:
        with pytest.raises(ValueError, match="a has numbers that were handed over twice"):
            list(assembled(parts, {"a": [4, 3]}, CPU))


def other_bits(rank, world) -> str:
    """What the head says where one bit of the memory has changed since it was written."""
    layout, whole = Layout(model(), "lm", place([0])), whole_model(model(), "lm", torch.float32)
    handover = Handover()
    handed = handover.write(engine_of(layout, ProcessGroups([(0,)], 240.0, CPU), whole, 0))
    assert handed is not None
    assert len(dict(handover.tensors())) == len(whole)
    opened(handed["ranks"][0]["memories"][0])[0] ^= 1
    try:
        handover.tensors()
    except GenerationFault as fault:
        return str(fault)
    return ""


@pytest.mark.dist
def test_a_head_that_finds_other_bits_than_were_handed_over_names_the_tensor(ranks):
    (said,) = ranks.run(1, other_bits)
    assert said == "the head finds other bits of 'model.embed_tokens.weight' than ranks have handed over"


def fits(rank, world, shape) -> bool:
    layout, whole = Layout(shape, "lm", place([0])), whole_model(shape, "lm", torch.bfloat16)
    handed = Handover().write(engine_of(layout, ProcessGroups([(0,)], 240.0, CPU), whole, 0))
    return read(handed).keys() == {name for spec in layout.parameters for name in spec.stored}


@pytest.mark.dist
def test_several_parameters_of_one_tensor_of_files_have_room_though_each_begins_anew(ranks):
    """Queries, keys, values, gates and ups of phi3 have 33 x 2 numbers, 132 bytes, and begin at multiples of 64."""
    sizes = {"layers": 2, "hidden": 2, "intermediate": 33, "query_heads": 1, "kv_heads": 1, "head_dim": 33}
    shape = replace(shape_of(tiny_config("phi3")), **sizes)
    assert ranks.run(1, fits, shape) == [True]


def test_a_digest_tells_any_bit_and_any_two_words_that_change_places():
    memory = HostMemory(1 << 18)
    one, other = (memory.copied(torch.arange(4097 * 2).view(2, 4097).mT + first) for first in (0, 10**6))
    parts = {"one": [((), one)], "other": [((), other)]}
    known = digests_of(parts)
    assert known == digests_of(
        {name: [((), part.mT.contiguous().mT)] for name, ((_, part),) in parts.items()}
    )
    one[[7, 9]] = one[[9, 7]]
    swapped = digests_of(parts)
    other.view(torch.uint8)[-1, -1] ^= 1
    flipped = digests_of(parts)
    assert [name for name in known if known[name] != swapped[name]] == ["one"]
    assert [name for name in known if swapped[name] != flipped[name]] == ["other"]
    assert len(set(map(digest_of_all, (known, swapped, flipped)))) == 3
    memory.close()


def test_a_digest_copies_what_lies_apart_by_pieces(monkeypatch: pytest.MonkeyPatch):
    """A GPU that lends has no room for a second copy of all experts of a layer."""
    experts, largest = torch.arange(8 * 4 * 6.0).view(8, 4, 6).mT, list[int]()
    known, copy = digests_of({"a": [((), experts.contiguous())]}), torch.Tensor.contiguous
    monkeypatch.setattr(shared_weights, "_WORDS", 24)
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda of: largest.append(of.nbytes) or copy(of))
    apart = digests_of({"a": [((), experts)]})
    assert max(largest) == 24 * 8
    assert apart == digests_of({"a": [((), copy(experts))]}) != known


@pytest.mark.parametrize("numbers", [1, 3, 4, 4099])
def test_a_digest_tells_the_last_bit_of_16_bits_wherever_they_lie(numbers: int):
    whole = torch.arange(numbers + 1, dtype=torch.int16)
    apart, inside = whole[1:].clone(), whole[1:]
    known = digests_of({"a": [((), apart)]})
    assert digests_of({"a": [((), inside)]}) == known
    inside[-1] ^= -(2**15)
    assert digests_of({"a": [((), inside)]}) != known


HANDLE = (1, b"\x02c\x00\xff", 4096, 512, b"/torch_7_8", 9, b"event", True)
"""What torch says of memory on the GPU that its owner sees as 1."""


def test_memory_of_a_gpu_is_opened_by_what_its_owner_says_on_the_same_gpu():
    """Processes that see other GPUs, or see them in another order, number them otherwise."""
    where = json.loads(json.dumps(described("GPU-b", HANDLE)))
    opened_by = (HANDLE[1], 4096, 512, b"/torch_none", 0, b"", False)
    assert opening(where, ["GPU-b"]) == (0, *opened_by)
    assert opening(where, ["GPU-c", "GPU-a", "GPU-b"]) == (2, *opened_by)
    with pytest.raises(ValueError, match="GPU GPU-b has weights, and is none of those that vLLM sees: GPU-a"):
        opening(where, ["GPU-a"])


def test_memory_of_a_gpu_that_another_process_may_be_unable_to_open_is_refused():
    with pytest.raises(ValueError, match=r"segments.*PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF"):
        described("GPU-b", (1, b"\x02e1234", *HANDLE[2:]))


class Buffer(bytearray):
    """It can be seen whether it is still there."""


class Counters:
    """What torch counts in a file that owner and readers map: CudaIPCTypes.cpp, StorageSharing.cpp."""

    def __init__(self) -> None:
        self._of = list[ctypes.c_uint64]()

    def share(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        self._of.append(ctypes.c_uint64(1))  # for any number of readers
        return (
            1,
            b"\x02c%d" % storage.data_ptr(),
            storage.nbytes(),
            0,
            FILE,
            len(self._of) - 1,
            b"event",
            True,
        )

    def release(self, file: bytes, at: int) -> None:
        if file == FILE:  # of a file that does not exist, torch catches the error
            self._of[at].value -= 1

    def kept(self) -> list[int]:
        """Those that torch does not free."""
        return [each.value for each in self._of if each.value > 0]


FILE = b"/torch_7_8"


@pytest.mark.parametrize("readers", [0, 1, 2])
def test_memory_that_is_lent_stays_until_it_is_taken_back_and_is_then_free(
    monkeypatch: pytest.MonkeyPatch, readers: int
):
    """On CPUs, with stand-ins for what torch does on GPUs only. A reader that died is as none."""
    counters, collected, waited, ends = Counters(), list[int](), list[Any](), list[tuple[bytes, int]]()

    def open_again(number: int, block: bytes, size: int, offset: int, *end: Any) -> torch.UntypedStorage:
        assert (number, offset, *end[2:]) == (0, 0, b"", False)
        ends.append(end[:2])
        return torch._C._construct_storage_from_data_pointer(int(block[2:]), CPU, size)

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda storage: counters.share(storage))
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(open_again))
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", counters.release)
    for name, standing_in in {
        "synchronize": waited.append,
        "ipc_collect": lambda: collected.append(len(counters.kept())),
        "device_count": lambda: 1,
        "get_device_properties": lambda device: SimpleNamespace(uuid="GPU-b"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, standing_in)
    buffers = [Buffer(96), Buffer(20)]
    lent, alive = Lent(), [weakref.ref(buffer) for buffer in buffers]
    weights = [torch.frombuffer(buffer, dtype=torch.float32) for buffer in buffers]
    expected = [torch.randn(weight.shape, out=weight).clone() for weight in weights]
    where = json.loads(json.dumps([lent.where(weight[1:]) for weight in weights]))
    del buffers, weights
    assert waited == [CPU] * 2, "the owner's streams have ended"
    for each, weight in [*zip(where, expected, strict=True)] * readers:
        assert torch.equal(opened(each).view(torch.float32), weight)
    for end in ends:  # each reader has let go
        counters.release(*end)
    assert len(ends) == 2 * readers
    assert all(buffer() is not None for buffer in alive), "merged weights are nowhere else"
    assert counters.kept() == [1, 1]
    lent.take_back()
    assert collected == [0]
    assert not any(buffer() is not None for buffer in alive)
    lent.take_back()
    assert (collected, counters.kept()) == ([0], []), "each is counted out once"
