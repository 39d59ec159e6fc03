"""CUDA graphs for decoding: for a small batch, launching the kernels one by one takes longer than running them."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from rlhf_tasks.parallel.generate.kv_cache import KVCache

Forward = Callable[[Tensor, MicroBatch, KVCache], Tensor]


class DecodeGraphs:
    """CUDA graphs of one stage's decode step, one for each (rows, span of the cache) that occurs.

    forward  the stage: (x, micro-batch, cache) -> output
    cache    of the decoding sequences; a graph is bound to its memory
    """

    def __init__(self, forward: Forward, cache: KVCache) -> None:
        self._forward, self._cache = forward, cache
        self._shape: tuple[int, int] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Tensor | None = None

    @staticmethod
    def rows_for(remaining: int) -> int:
        """The batch size for `remaining` sequences: the next power of two, so that there are few sizes."""
        return 1 << (remaining - 1).bit_length() if remaining else 0

    def run(self, x: Tensor, micro: MicroBatch) -> Tensor:
        """The stage's output for one token per row, valid until the next call. Shapes as in `Stage.forward`."""
        shape = (self._cache.rows, self._cache.span)
        if shape != self._shape:
            # Earlier shapes seldom come again. A graph's memory is freed once graph and output are both freed.
            # Capturing into the memory pool of a freed graph is an error in torch's allocator.
            self._graph = self._output = None
            self._graph, self._output = self._capture(x, micro)
            self._shape = shape
        assert self._graph is not None
        assert self._output is not None
        self._x.copy_(x)
        self._positions.copy_(micro.position_ids)
        self._graph.replay()
        return self._output

    def _capture(self, x: Tensor, micro: MicroBatch) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture a step in a new memory pool. Returns the graph and the tensor for the output of a replay."""
        self._x, self._positions = x.clone(), micro.position_ids.clone()
        micro = replace(micro, position_ids=self._positions)
        # Run once before the capture: a capture does not allow loading kernels or allocating library workspaces.
        # This is harmless: the captured step writes the same keys to the same column again.
        self._cache.forget_masks()
        self._forward(self._x, micro, self._cache)
        self._cache.forget_masks()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self._forward(self._x, micro, self._cache)
        self._cache.forget_masks()
        return graph, output
