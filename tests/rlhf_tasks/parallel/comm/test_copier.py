"""Copies in host memory: whole when they are given, used again when asked, pinned in exact size on CUDA."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from rlhf_tasks.parallel.comm import copier as copying
from rlhf_tasks.parallel.comm.copier import host_copies, host_zeros

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
    made, real = [], copying._PinnedPages

    def pages(size_bytes: int):
        one = real(size_bytes)
        made.append((weakref.ref(one), len(one)))
        return one

    monkeypatch.setattr(copying, "_PinnedPages", pages)
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

    monkeypatch.setattr(copying, "_cuda", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    monkeypatch.setattr(torch.cuda, "check_error", check)
    with pytest.raises(MemoryError, match=r"does not pin 0.004 GB .* out of memory \(2\).*ulimit -l"):
        host_zeros(1_000_000, torch.float32, torch.device("cuda"))
