"""Seconds of the parts of a call: the interface `Timing`, and its implementation by a device's roofline.

planner/pricing/measured.py implements it by measured profiles. planner/pricing/analytic.py writes a roofline in the
form of a measured profile. The cost model does not see the difference.
"""

from collections.abc import Sequence
from typing import Protocol

from planner.pricing.device_share import Sizes
from planner.pricing.devices import DeviceProfile
from rlhf_tasks.parallel.layout.flops import head_flops, layer_flops
from rlhf_tasks.parallel.layout.shape import Head
from rlhf_tasks.profiling.measurements import Exchange, Pass

GRADIENT_BYTES = 4  # float32 (gradients.py)
UPDATE_TRAFFIC_BYTES = (
    30  # per parameter: gradient, master and moments read; master, moments and weight written
)

ROUTING = 0.7
"""Host time of routing tokens to experts, in that of a dense layer: measured on one CPU thread, hidden size 24."""


class Timing(Protocol):
    """One model under one degree of tensor parallelism on devices of one class or several.

    tokens   tokens of a micro-batch on one dp rank; while decoding, number of sequences
    context  length of its sequences in tokens; while decoding, of their KV cache
    All results are in seconds and include the sums over the tp group.
    """

    def layer_s(self, kind: Pass, tokens: float, context: float) -> float:
        """Seconds of one layer over `tokens` tokens. `backward` is what training adds to `forward`."""
        ...

    def embedding_s(self, kind: Pass, tokens: float) -> float:
        """Seconds of the first stage besides its layers, over `tokens` tokens."""
        ...

    def head_s(self, kind: Pass, tokens: float, context: float) -> float:
        """Seconds of the last stage besides its layers: head, loss or next token, and the engine's overhead."""
        ...

    def update_s(self, parameters: float, dp: int) -> float:
        """Seconds of the optimizer on a device that holds `parameters` parameters, without its collectives."""
        ...

    def exchange_s(self, kind: Exchange, ranks: int, size_bytes: float, crosses_hosts: bool) -> float:
        """Seconds of a collective or message of size_bytes bytes in all; 0 for one rank."""
        ...


class Roofline:
    """Timing from a device's peaks, efficiencies and overheads.

    local     sizes of the model on a device
    head      the head on the last stage
    crosses   whether the tp group spans hosts
    itemsize  bytes of a parameter or activation
    """

    def __init__(
        self, device: DeviceProfile, local: Sizes, head: Head, tp: int, crosses: bool, itemsize: int
    ) -> None:
        self._device, self._local, self._head = device, local, head
        self._tp, self._crosses, self._itemsize = tp, crosses, itemsize

    def layer_s(self, kind: Pass, tokens: float, context: float) -> float:
        """Seconds of one layer over `tokens` tokens: roofline, two sums over the tp group, and overhead.

        A backward pass does twice the forward pass's work.
        """
        decoding = kind == "decode"
        attended = context if decoding else context / 2
        passes = 2 if kind == "backward" else 1
        overhead = self._overhead_s(tokens, decoding)
        return self._work_s(tokens, attended, passes, decoding) + 2 * self._reduce_s(tokens) + overhead

    def _overhead_s(self, tokens: float, decoding: bool) -> float:
        """Host time of a layer. Mixtures of experts decode without CUDA graphs."""
        device, local = self._device, self._local
        if not local.experts:
            return device.decode_overhead_s if decoding else device.layer_overhead_s
        return device.layer_overhead_s * (1 + ROUTING) + device.expert_overhead_s * local.busy(tokens)

    def embedding_s(self, kind: Pass, tokens: float) -> float:
        """Seconds to sum the vocabulary-parallel embedding of `tokens` tokens; what it reads is negligible."""
        return 0.0 if kind == "backward" else self._reduce_s(tokens)

    def head_s(self, kind: Pass, tokens: float, context: float) -> float:
        """Seconds of computing and reading the logits. A prefill needs only those of each prompt's last token."""
        if kind == "prefill":
            tokens = tokens / context
        passes = 2 if kind == "backward" else 1
        local = self._local
        traffic = (local.vocab * local.hidden + 2 * tokens * local.vocab) * self._itemsize
        flops = passes * head_flops(tokens, local.hidden, local.vocab)
        return self._device.compute_s(flops, passes * traffic)

    def update_s(self, parameters: float, dp: int) -> float:
        """Seconds: each dp rank updates its share of the parameters, and clears their gradients."""
        traffic = parameters * (UPDATE_TRAFFIC_BYTES + GRADIENT_BYTES) / dp
        return self._device.compute_s(0, traffic) + self._device.optimizer_overhead_s

    def exchange_s(self, kind: Exchange, ranks: int, size_bytes: float, crosses_hosts: bool) -> float:
        """Seconds of a ring collective or a message of size_bytes bytes in all; 0 for one rank.

        Sharing a batch costs one more latency, for its description.
        """
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
        """Seconds of summing the hidden states of `tokens` tokens over the tp group."""
        size_bytes = tokens * self._local.hidden * self._itemsize
        return self._device.all_reduce_s(size_bytes, self._tp, self._crosses)

    def _work_s(self, tokens: float, attended: float, passes: int, cached: bool) -> float:
        """Roofline seconds of a layer for `tokens` tokens, each attending to `attended` others on average.

        passes  multiple of the forward pass's work
        cached  keys and values of the others are read from the KV cache
        """
        local = self._local
        flops = layer_flops(tokens, attended, local.active, local.query)
        # Read and written: hidden states; query, key and value; the MLP's branches and their product.
        of_mlp = (6 if local.gated else 4) * local.intermediate
        elements = tokens * (8 * local.hidden + 2 * local.query + 4 * local.kv + of_mlp)
        if local.routed:
            # Copies for experts: written, read by both branches; their outputs: written, joined, sorted, summed. The
            # product of the branches is weighed.
            elements += tokens * (9 * local.routed + 2 * local.intermediate)
        if cached:
            elements += 2 * tokens * attended * local.kv
        traffic = passes * (elements + local.read(tokens)) * self._itemsize
        return self._device.compute_s(passes * flops, traffic)


class Slowest:
    """Timing of a mesh with several device classes: each time is that of the slowest class.

    timings  [classes] of operations
    links    [classes] of exchanges, which may be between devices of different classes
    """

    def __init__(self, timings: Sequence[Timing], links: Sequence[Timing]) -> None:
        self._timings, self._links = timings, links

    def layer_s(self, kind: Pass, tokens: float, context: float) -> float:
        """Seconds of one layer over `tokens` tokens on the slowest class."""
        return max(timing.layer_s(kind, tokens, context) for timing in self._timings)

    def embedding_s(self, kind: Pass, tokens: float) -> float:
        """Seconds of the embedding of `tokens` tokens on the slowest class."""
        return max(timing.embedding_s(kind, tokens) for timing in self._timings)

    def head_s(self, kind: Pass, tokens: float, context: float) -> float:
        """Seconds of the head over `tokens` tokens on the slowest class."""
        return max(timing.head_s(kind, tokens, context) for timing in self._timings)

    def update_s(self, parameters: float, dp: int) -> float:
        """Seconds of the optimizer on the slowest class."""
        return max(timing.update_s(parameters, dp) for timing in self._timings)

    def exchange_s(self, kind: Exchange, ranks: int, size_bytes: float, crosses_hosts: bool) -> float:
        """Seconds of a collective or message of size_bytes bytes over the slowest class's links."""
        return max(timing.exchange_s(kind, ranks, size_bytes, crosses_hosts) for timing in self._links)
