"""CUDA graphs for decoding: a step of a small batch is too short for launching its kernels one by one."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from rlhf_tasks.parallel.generate.kv_cache import KVCache

Forward = Callable[[Tensor, MicroBatch, KVCache], Tensor]


class DecodeGraphs:
    """Graphs of one stage's decode step, one for each (rows, span of the cache) that comes up.

    forward  the stage: (x, micro-batch, cache) -> output
    cache    of the sequences that decode; a graph is bound to its memory
    """

    def __init__(self, forward: Forward, cache: KVCache) -> None:
        self._forward, self._cache = forward, cache
        self._shape: tuple[int, tuple[int, int]] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Tensor | None = None

    @staticmethod
    def rows_for(remaining: int) -> int:
        """The batch size to go on with: the next power of two, so that few sizes come up."""
        return 1 << (remaining - 1).bit_length() if remaining else 0

    def run(self, x: Tensor, micro: MicroBatch) -> Tensor:
        """The stage's output; it stays valid until the next call."""
        shape = (self._cache.rows, self._cache.span)
        if shape != self._shape:
            # Rows and spans never come back once left. A graph's memory goes when the graph and its output are
            # both gone; a capture into the pool of a graph that is gone is an error of torch's allocator.
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
        """Record a step, in memory of its own: the graph, and where a replay puts its output."""
        self._x, self._positions = x.clone(), micro.position_ids.clone()
        micro = replace(micro, position_ids=self._positions)
        # Run once outside: kernels load and libraries take their workspaces, which a capture does not allow.
        # The step that is captured writes the same keys to the same column again.
        self._cache.forget_masks()
        self._forward(self._x, micro, self._cache)
        self._cache.forget_masks()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self._forward(self._x, micro, self._cache)
        self._cache.forget_masks()
        return graph, output
