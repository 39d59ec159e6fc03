"""Copies in host memory: whole when they are given, used again when asked, pinned in exact size on CUDA. Parameters
that are kept there come back bit by bit, in order, and only who waits finds them complete."""

import gc
import threading
import weakref
from concurrent.futures import CancelledError
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from prefect_rlhf.rlhf_tasks.parallel.comm import host_memory
from prefect_rlhf.rlhf_tasks.parallel.comm.host_memory import (
    HostCopy,
    ThreadCopier,
    copier,
    host_copies,
    host_zeros,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def values(device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes, dtype = ((300, 5), (0,), (70_001,)), torch.bfloat16
    return [torch.randn(shape).to(device, dtype) for shape in shapes]


@pytest.mark.parametrize("device", DEVICES)
def test_copies_are_whole_and_keep_what_they_were_made_of(device):
    given = values(device)
    expected = [one.cpu().clone() for one in given]
    copies = host_copies(given)
    for one in given:
        one.zero_()

    assert all(copy.device.type == "cpu" for copy in copies)
    assert all(torch.equal(copy, one) for copy, one in zip(copies, expected, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_copies_are_used_again(device):
    given = values(device)
    first = host_copies(given)
    where = [copy.data_ptr() for copy in first]
    for one in given:
        one.add_(1)
    again = host_copies(given, first)

    assert [copy.data_ptr() for copy in again] == where
    assert all(torch.equal(copy, one.cpu()) for copy, one in zip(again, given, strict=True))


def test_copies_of_another_number_of_tensors_are_refused():
    with pytest.raises(ValueError, match="argument 2 is longer"):
        host_copies(values("cpu"), host_copies(values("cpu")[:2]))


@pytest.mark.gpu
def test_memory_for_a_gpu_is_pinned_and_unpinned_when_nobody_has_it(monkeypatch):
    made, real = [], host_memory._PinnedPages

    def pages(size_bytes: int):
        one = real(size_bytes)
        made.append((weakref.ref(one), len(one)))
        return one

    monkeypatch.setattr(host_memory, "_PinnedPages", pages)
    zeros = host_zeros(1_000_001, torch.float32, torch.device("cuda"))
    part = zeros[5:9]
    assert zeros.is_pinned()
    assert not zeros.any()
    there, size_bytes = made[0]
    assert size_bytes == 4_000_004, "and not the next power of two"
    del zeros
    gc.collect()
    assert there() is not None, "a part of it is still in use"
    assert part.is_pinned()
    del part
    gc.collect()
    assert there() is None


def test_memory_that_cuda_does_not_pin_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch):
    class Refused(torch.cuda.CudaError):
        def __init__(self, code: int) -> None:
            RuntimeError.__init__(self, f"out of memory ({code})")

    def check(code: int) -> None:
        raise Refused(code)

    monkeypatch.setattr(host_memory, "_cuda", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    monkeypatch.setattr(torch.cuda, "check_error", check)
    with pytest.raises(MemoryError, match=r"does not pin 0.004 GB .* out of memory \(2\).*ulimit -l"):
        host_zeros(1_000_000, torch.float32, torch.device("cuda"))


CPU = torch.device("cpu")
PATIENCE_S = 120.0


@pytest.fixture
def gate(monkeypatch):
    """Copies pass only while the gate is open; it tells when one has come to it, and what has passed."""
    opened, reached, passed, real = threading.Event(), threading.Event(), [], host_memory._copy

    def gated(pairs):
        reached.set()
        assert opened.wait(PATIENCE_S)
        real(pairs)
        passed.append([tuple(there.shape) for _, there in pairs])

    monkeypatch.setattr(host_memory, "_copy", gated)
    opened.reached, opened.passed = reached, passed  # type: ignore[attr-defined]
    yield opened
    opened.set()


@pytest.fixture
def copies():
    made = ThreadCopier()
    yield made
    made.close()


def module(width: int = 3) -> nn.Module:
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(width, 5), nn.Linear(5, 2))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_onloaded_parameters_are_what_they_were(device):
    made = module().to(device)
    before, x = {n: p.detach().clone() for n, p in made.named_parameters()}, torch.ones(4, 3, device=device)
    expected = made(x)
    copies = copier(torch.device(device))
    held = HostCopy.of_module(made, copies)
    for _ in range(3):
        assert held.is_away
        assert all(p.numel() == 0 and p.device.type == device for p in made.parameters())
        held.onload()
        held.wait()
        assert all(torch.equal(p, before[n]) for n, p in made.named_parameters())
        assert torch.equal(made(x), expected)
        held.offload()
    copies.close()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("changes", [False, True])
def test_what_trains_comes_back_as_the_device_left_it_and_what_is_frozen_as_it_was(device, changes):
    copies, used = copier(torch.device(device)), list[torch.Tensor]()

    def use(tensors):
        used[:] = tensors

    held = HostCopy([torch.arange(5.0, device=device)], use, copies, changes)
    for step in range(3):
        assert [tensor.numel() for tensor in used] == [0]
        held.onload()
        held.wait()
        assert used[0].device.type == device
        assert used[0].tolist() == [i + 10 * step * changes for i in range(5)]
        used[0] += 10
        held.offload()
    copies.close()


def test_an_onload_returns_at_once_and_who_waits_finds_the_copy_complete(gate, copies):
    made = module()
    before = [p.detach().clone() for p in made.parameters()]
    held = HostCopy.of_module(made, copies)
    held.onload()
    waiting = threading.Thread(target=held.wait)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    assert not gate.passed
    gate.set()
    waiting.join(PATIENCE_S)
    assert all(torch.equal(p, q) for p, q in zip(made.parameters(), before, strict=True))


def test_copies_follow_one_another_in_the_order_of_their_onloads(gate, copies):
    held = [HostCopy.of_module(module(width), copies) for width in (3, 4, 5)]
    for one in held:
        one.onload()
    gate.set()
    held[2].wait()  # the last one ends after all others
    assert [shapes[0] for shapes in gate.passed] == [(5, 3), (5, 4), (5, 5)]


def test_closing_waits_for_the_copy_under_way_and_drops_the_rest(gate):
    copies = ThreadCopier()
    held = [HostCopy.of_module(module(width), copies) for width in (3, 4)]
    for one in held:
        one.onload()
    assert gate.reached.wait(PATIENCE_S), "or there is no copy under way"
    closing = threading.Thread(target=copies.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    gate.set()
    closing.join(PATIENCE_S)
    assert [shapes[0] for shapes in gate.passed] == [(5, 3)]
    with pytest.raises(CancelledError):
        held[1].wait()


def test_what_is_away_cannot_be_waited_for_nor_come_twice(copies):
    held = HostCopy.of_module(module(), copies)
    with pytest.raises(AssertionError, match="in host memory: no onload was started"):
        held.wait()
    held.onload()
    with pytest.raises(AssertionError, match="on the device already"):
        held.onload()
