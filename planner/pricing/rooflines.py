"""Seconds of what calls are made of: the questions that the cost model asks of a profile, and their answers from
a device's data sheet. Answers of measured profiles are in planner/pricing/measured.py, and
planner/pricing/analytic.py writes a data sheet's as such a profile; the cost model does not know the difference.
"""

from collections.abc import Sequence
from typing import Protocol

from planner.pricing.device_share import Sizes
from planner.pricing.devices import DeviceProfile
from rlhf_tasks.parallel.layout.flops import head_flops, layer_flops
from rlhf_tasks.parallel.layout.shape import Head
from rlhf_tasks.profiling.measurements import Exchange, Pass

GRADIENT_BYTES = 4  # float32 (optimizer.py)
UPDATE_TRAFFIC_BYTES = 30  # of one parameter's update: gradient, master, moments read; all but it written


class Timing(Protocol):
    """One model under one degree of tensor parallelism on devices of one class or several.

    tokens   of a micro-batch on one dp rank; while decoding: its sequences
    context  length of its sequences; while decoding, of their KV cache
    Sums over the tp group are in all seconds.
    """

    def layer_s(self, kind: Pass, tokens: float, context: float) -> float:
        """One layer. `backward` is what training adds to `forward`."""
        ...

    def embedding_s(self, kind: Pass, tokens: float) -> float:
        """The first stage besides its layers."""
        ...

    def head_s(self, kind: Pass, tokens: float, context: float) -> float:
        """The last stage besides its layers: the head, the loss or the next token, and the engine's own work."""
        ...

    def update_s(self, parameters: float, dp: int) -> float:
        """The optimizer's work on a device that holds so many parameters, without its collectives."""
        ...

    def exchange_s(self, kind: Exchange, ranks: int, size_bytes: float, crosses_hosts: bool) -> float:
        """A collective or message of size_bytes in all; 0 for one rank."""
        ...


class Roofline:
    """Timing from a device's peaks, efficiencies and overheads.

    local    sizes of the model on a device
    head     what stands on the last stage
    crosses  whether a tp group spans hosts
    """

    def __init__(
        self, device: DeviceProfile, local: Sizes, head: Head, tp: int, crosses: bool, itemsize: int
    ) -> None:
        self._device, self._local, self._head = device, local, head
        self._tp, self._crosses, self._itemsize = tp, crosses, itemsize

    def layer_s(self, kind: Pass, tokens: float, context: float) -> float:
        """Arithmetic and memory traffic; a backward pass is twice the forward's work."""
        decoding = kind == "decode"
        attended = context if decoding else context / 2
        passes = 2 if kind == "backward" else 1
        overhead = self._device.decode_overhead_s if decoding else self._device.layer_overhead_s
        return self._work_s(tokens, attended, passes, decoding) + 2 * self._reduce_s(tokens) + overhead

    def embedding_s(self, kind: Pass, tokens: float) -> float:
        """The sum of the vocabulary-parallel embedding; what it reads is little."""
        return 0.0 if kind == "backward" else self._reduce_s(tokens)

    def head_s(self, kind: Pass, tokens: float, context: float) -> float:
        """Logits, and what reads them. A prefill needs those of each prompt's last token only."""
        if kind == "prefill":
            tokens = tokens / context
        passes = 2 if kind == "backward" else 1
        local = self._local
        traffic = (local.vocab * local.hidden + 2 * tokens * local.vocab) * self._itemsize
        flops = passes * head_flops(tokens, local.hidden, local.vocab)
        return self._device.compute_s(flops, passes * traffic)

    def update_s(self, parameters: float, dp: int) -> float:
        """Each dp rank updates its share; the gradients of all are cleared."""
        traffic = parameters * (UPDATE_TRAFFIC_BYTES / dp + GRADIENT_BYTES)
        return self._device.compute_s(0, traffic) + self._device.optimizer_overhead_s

    def exchange_s(self, kind: Exchange, ranks: int, size_bytes: float, crosses_hosts: bool) -> float:
        """Rings; a batch that is shared goes round with its description."""
        if ranks == 1:
            return 0.0
        device = self._device
        match kind:
            case "all_reduce":
                return device.all_reduce_s(size_bytes, ranks, crosses_hosts)
            case "all_gather" | "reduce_scatter":
                return device.gather_s(size_bytes, ranks, crosses_hosts)
            case "share":
                return device.send_s(size_bytes, crosses_hosts) + device.link(crosses_hosts).latency_s
            case "send" | "redistribute":
                return device.send_s(size_bytes, crosses_hosts)

    def _reduce_s(self, tokens: float) -> float:
        """A sum of hidden states over the tp group."""
        size_bytes = tokens * self._local.hidden * self._itemsize
        return self._device.all_reduce_s(size_bytes, self._tp, self._crosses)

    def _work_s(self, tokens: float, attended: float, passes: int, cached: bool) -> float:
        """Arithmetic of a layer for some tokens, each attending to `attended` others on average.

        passes  how many times the forward's work
        cached  keys and values of the others are read from the KV cache
        """
        local = self._local
        flops = layer_flops(tokens, attended, local.layer, local.query)
        # Read and written: hidden states; query, key and value; the MLP's two branches and their product
        elements = tokens * (8 * local.hidden + 2 * local.query + 4 * local.kv + 6 * local.intermediate)
        if cached:
            elements += 2 * tokens * attended * local.kv
        return self._device.compute_s(passes * flops, passes * (elements + local.layer) * self._itemsize)


class Slowest:
    """Timing of a mesh of several device classes: of each answer, that of the slowest class.

    timings  of each class; links: what prices exchanges between devices of different classes, of each class
    """

    def __init__(self, timings: Sequence[Timing], links: Sequence[Timing]) -> None:
        self._timings, self._links = timings, links

    def layer_s(self, kind: Pass, tokens: float, context: float) -> float:
        return max(timing.layer_s(kind, tokens, context) for timing in self._timings)

    def embedding_s(self, kind: Pass, tokens: float) -> float:
        return max(timing.embedding_s(kind, tokens) for timing in self._timings)

    def head_s(self, kind: Pass, tokens: float, context: float) -> float:
        return max(timing.head_s(kind, tokens, context) for timing in self._timings)

    def update_s(self, parameters: float, dp: int) -> float:
        return max(timing.update_s(parameters, dp) for timing in self._timings)

    def exchange_s(self, kind: Exchange, ranks: int, size_bytes: float, crosses_hosts: bool) -> float:
        return max(timing.exchange_s(kind, ranks, size_bytes, crosses_hosts) for timing in self._links)
