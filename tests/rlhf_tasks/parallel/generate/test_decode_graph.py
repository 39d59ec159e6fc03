"""Decoding as on CUDA: captured steps, wide reads of the cache, late looks at who has finished."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf_tasks.parallel.generate import slots
from rlhf_tasks.parallel.generate.decode_graph import DecodeGraphs
from rlhf_tasks.parallel.generate.slots import DecodingPace
from tests.rlhf_tasks.parallel.generate.test_generation import STOPS, Alone, build, draw, prompts, responses

PACE = DecodingPace(check_every=4, span_multiple=8, graphs=True)
LENGTHS = [(3, 9, 1, 6, 4, 5, 2), (2,) * 13, (30, 1, 2, 3, 17)]
NEW_TOKENS = 30


class Recording(TorchDispatchMode):
    """Writes down every operation on tensors; reading a tensor on the host, which a capture forbids, fails."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a captured step waits for the device"
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result


class GraphOnCPU:
    """What a CUDA graph does: the same operations on the same memory again, and nothing of the Python around."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, tuple, dict, Any]] = []

    def replay(self) -> None:
        for func, args, kwargs, result in self.operations:
            again = func(*args, **kwargs)
            for place, value in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(place, Tensor) and place.data_ptr() != value.data_ptr():
                    place.copy_(value)


class Captures:
    """Stands in for `torch.cuda.graph`: counts captures, and holds that each begins with the last one gone."""

    def __init__(self) -> None:
        self.count = 0
        self._last: list[weakref.ref] = []

    @contextmanager
    def __call__(self, graph: GraphOnCPU, pool: Any = None) -> Iterator[None]:
        assert pool is None, "torch's allocator refuses the pool of a graph that is gone"
        assert not any(last() for last in self._last), "the memory of the graph before is still held"
        with Recording() as recording:
            yield
        graph.operations = recording.operations
        output = graph.operations[-1][-1]
        self._last = [weakref.ref(graph), weakref.ref(output)]
        self.count += 1


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    captures = Captures()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", GraphOnCPU)
    monkeypatch.setattr(torch.cuda, "graph", captures)
    return captures


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_captured_steps_give_the_tokens_of_plain_ones(captures, monkeypatch, family: str, lengths):
    engine = build(family, torch.float64, **({"sliding_window": 4} if family == "mistral" else {}))
    batch, options = prompts(lengths), {"max_new_tokens": NEW_TOKENS, "stop_ids": STOPS}
    plain = draw(engine, batch, **options)
    monkeypatch.setitem(slots.PACES, "cpu", PACE)
    captured = draw(engine, batch, **options)
    assert captures.count >= 3, "the shapes must change for the test to say something"
    assert responses(captured) == responses(plain)
    assert len({len(response) for response in responses(plain).values()}) > 2
    assert torch.equal(captured["truncated"].values, plain["truncated"].values)
    torch.testing.assert_close(captured["old_logprobs"].values, plain["old_logprobs"].values)


def test_rows_are_powers_of_two():
    assert [DecodeGraphs.rows_for(n) for n in (0, 1, 2, 3, 4, 5, 9)] == [0, 1, 2, 4, 4, 8, 16]


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_several_captures_on_a_device_give_the_tokens_of_the_cpu(monkeypatch, lengths):
    device = torch.device("cuda", 0)
    batch, options = prompts(lengths), {"max_new_tokens": NEW_TOKENS, "stop_ids": STOPS}
    plain = draw(build("llama", torch.float64), batch, **options)
    monkeypatch.setitem(slots.PACES, "cuda", PACE)
    made, capture = [], DecodeGraphs._capture
    monkeypatch.setattr(DecodeGraphs, "_capture", lambda *given: made.append(1) or capture(*given))
    captured = draw(build("llama", torch.float64, groups=Alone(device)), batch, **options)
    assert len(made) >= 3
    assert responses(captured) == responses(plain)
