"""One model under one strategy on a mesh: the terms of which the formulas of call_formulas.py are composed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from prefect_rlhf.planner.plan.workload import Workload
from prefect_rlhf.planner.pricing.figures import Factor
from prefect_rlhf.planner.pricing.rooflines import STATE_BYTES, Sizes, Timing, stage_kinds
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import Recompute
from prefect_rlhf.rlhf_tasks.parallel.layout.shares import Gathering
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy
from prefect_rlhf.rlhf_tasks.parallel.layout.work import LEAST_SHARED, LOGITS_AT_ONCE, layer_flops
from prefect_rlhf.rlhf_tasks.profiling.measurements import Exchange, Pass
from prefect_rlhf.rlhf_tasks.spec import ModelFunctionCall

REWORK = 0.1
"""Share of a layer's forward pass that its backward pass repeats under selective recomputation: norms, activations
and other memory traffic. For Llama 7B on an A100 .06, by its traffic; on a CPU core .04 to .17 at hidden sizes of 768
and 2048 (bfloat16, float32), and more below, where Python sees each operator of both passes."""

COPY_BYTES = 4  # what stays of each copy of a token for an expert: the token's number
SCORE_BYTES = 4  # of a score in memory, whose softmax is in float32 whatever the dtype (attention.py)
MASK_BYTES = 1  # of a pair of tokens
NORM_BYTES = 4  # of an element inside a norm, which computes in float32 whatever the weights are
LOGPROB_BYTES = 8  # of a logit whose log-probability is being computed: two float32 copies (logprobs.py)
TOKEN_BYTES = 4  # per token of most keys of a batch (docs/architecture.md)


@dataclass(frozen=True)
class CallCost:
    """What one call costs.

    seconds       its duration
    active_bytes  [stages] bytes that a device of each stage needs beyond parameters while the call runs
    """

    seconds: float
    active_bytes: tuple[float, ...]

    def times(self, factor: Factor) -> "CallCost":
        """The cost multiplied by a factor."""
        seconds = self.seconds * factor.seconds + factor.added_s
        return CallCost(seconds, tuple(n * factor.memory for n in self.active_bytes))


class Crossings(NamedTuple):
    """Whether the tp, dp, pp and cp groups of a placement span hosts; dp: of ranks with the same parameters."""

    tp: bool
    dp: bool
    pp: bool
    cp: bool = False


class AtStage(NamedTuple):
    """What differs at a stage whose layers are other ones than the model's on the mean (`OnMesh`)."""

    timing: Timing
    local: Sizes
    trained: Sizes


@dataclass(frozen=True)
class OnMesh:
    """One model under one strategy: seconds and bytes of the terms that a call's price is composed of.

    local     sizes of the model
    trained   the same object; or for a model with adapters, sizes of these
    overlap   share of a pass that hides the reduction of gradients, and the gathering of sharded weights
    gpus      whether GPUs are among the devices
    gathered  of sharded weights, what a device gathers
    stages    [stages] what differs there, one object for stages that are alike; empty: all layers are
    """

    timing: Timing
    workload: Workload
    local: Sizes
    trained: Sizes
    strategy: ParallelStrategy
    crossings: Crossings
    overlap: float = 0.0
    gpus: bool = False
    gathered: Gathering | None = None
    stages: tuple[AtStage, ...] = ()

    def at(self, stage: int) -> "OnMesh":
        """The same, of which a layer is the mean one of a stage."""
        return replace(self, **self.stages[stage]._asdict()) if self.stages else self

    def gather_s(self, back: bool = False) -> float:
        """Seconds in which sharded weights are gathered for a pass over all layers. back: for a backward pass."""
        if self.gathered is None:
            return 0.0
        elements = self.gathered.back if back else self.gathered.total
        buckets = max(1, round(self.gathered.buckets * elements / self.gathered.total))
        size_bytes = elements / buckets * self.workload.itemsize
        return buckets * self.exchange_s("all_gather", self.strategy.copies, size_bytes, self.crossings.dp)

    def waits_s(self, pass_s: float) -> float:
        """Seconds in which a forward pass waits for weights: nothing hides the gathering of the first ones."""
        if self.gathered is None:
            return 0.0
        gather_s = self.gather_s()
        return max(gather_s - self.overlap * pass_s, gather_s / self.gathered.buckets)

    @property
    def whole_bytes(self) -> float:
        """Bytes of sharded weights that are whole at a time during a pass."""
        return 0.0 if self.gathered is None else self.gathered.most * self.workload.itemsize

    @property
    def device_type(self) -> str:
        """The type of device, as torch names it, that takes more at a time: cuda where GPUs are among them."""
        return "cuda" if self.gpus else "cpu"

    def share(self, call: ModelFunctionCall, mini_batches: int = 1) -> int:
        """Sequences of the fullest dp rank, of a call's batch or part, or of one of its mini-batches."""
        return -(-(call.n_groups // (mini_batches * call.chunks)) // self.strategy.dp) * call.group_size

    def alike(self, call: ModelFunctionCall) -> int:
        """Sequences of a call that share a prompt in passes over whole sequences: of a group, or 1."""
        return call.group_size if self.workload.prompt_tokens >= LEAST_SHARED else 1

    @property
    def shared(self) -> float:
        """Tokens of a sample that are computed with another of its answers: the prompt of a pair."""
        tokens = self.workload.shared_tokens
        return tokens if tokens >= LEAST_SHARED else 0.0

    @property
    def length(self) -> float:
        """Tokens of a sequence: of a pair's, of the mean answer with the prompt."""
        return self.workload.mean_tokens / self.workload.answers

    def micro_batches(self, share: int, planned: int, alike: int) -> int:
        """Micro-batches of so many sequences: as planned, or more where `micro_batch_tokens` asks for them."""
        most, prompt, answer = (
            self.workload.micro_batch_tokens,
            self.workload.prompt_tokens,
            self.workload.new_tokens.mean,
        )
        if most is None:
            return planned
        groups, left = divmod(most, prompt + alike * answer - self.shared)
        in_each = int(groups) * alike + max(0, int((left - prompt) / answer))
        return max(planned, -(-share // max(1, in_each)))

    def prompts(self, share: int, micro_batches: int, alike: int) -> tuple[float, int]:
        """Prompts that a micro-batch computes: on average, and the fullest one.

        Micro-batches are consecutive sequences: a group that two of them cut is computed in both.
        """
        groups, fullest = share // alike, -(-share // micro_batches)
        computed = min(share, groups + micro_batches - math.gcd(groups, micro_batches))
        even = groups % micro_batches == 0 or micro_batches % groups == 0
        most = -(-fullest // alike) if even else min(fullest, (fullest - 2) // alike + 2)
        return computed / micro_batches, most

    def layers(self, stage: int) -> int:
        return self.local.stage_layers(self.strategy.pp, stage)

    def exchange_s(self, kind: Exchange, ranks: int, size_bytes: float, crosses: bool) -> float:
        return self.timing.exchange_s(kind, ranks, size_bytes, crosses)

    def pass_on_s(self, tokens: float) -> float:
        """Seconds to send the hidden states of `tokens` tokens to the next stage; 0 with one stage."""
        if self.strategy.pp == 1:
            return 0.0
        size_bytes = tokens * self.local.message * self.workload.itemsize
        return self.exchange_s("send", 2, size_bytes, self.crossings.pp)

    def each_stage(self, figure: Callable[[int], float]) -> list[float]:
        """A figure of every stage. It is computed once for inner stages with equally many, and alike, layers."""
        firsts, alike = stage_kinds(self.local.layers, self.strategy.pp, tuple(map(id, self.stages)))
        found = [figure(stage) for stage in firsts]
        return [found[kind] for kind in alike]

    def stages_s(
        self, kinds: Sequence[Pass], tokens: float, context: float, repeated: float = 0.0
    ) -> list[float]:
        """[stages] seconds of passes over a micro-batch.

        repeated  tokens of prompts besides `tokens`, which are computed with another sequence
        """

        def passes_s(mesh: OnMesh) -> list[float]:
            of_kinds = (mesh._pass_s(kind, tokens, context, repeated) for kind in kinds)
            return [sum(figure) for figure in zip(*of_kinds, strict=True)]

        alike = None if self.stages else passes_s(self)

        def stage_s(stage: int) -> float:
            layer_s, first_s, last_s = alike or passes_s(self.at(stage))
            seconds = self.layers(stage) * layer_s
            if stage == 0:
                seconds += first_s
            if stage == self.strategy.pp - 1:
                seconds += last_s
            return seconds

        return self.each_stage(stage_s)

    def _pass_s(
        self, kind: Pass, tokens: float, context: float, repeated: float
    ) -> tuple[float, float, float]:
        """Seconds of a pass over a micro-batch: (one layer, rest of the first stage, rest of the last stage)."""
        timing, whole = self.timing, tokens + repeated
        # A repeated token would have attended to its prompt, the others do to more than the mean.
        context = (whole * context - repeated * (self.shared or self.workload.prompt_tokens)) / tokens
        layer_s = timing.layer_s(kind, tokens, context) * self._layer_factor(kind, tokens, context)
        rework = {"none": 0.0, "selective": REWORK, "full": 1.0}[self.workload.recompute]
        if kind == "backward" and rework:
            forward_s = timing.layer_s("forward", tokens, context)
            layer_s += rework * forward_s * self._layer_factor("forward", tokens, context)
        if kind in ("forward", "backward"):
            layer_s += self._to_heads_s(tokens) * (1 + bool(rework) * (kind == "backward"))
        embedding_s = timing.embedding_s(kind, tokens)
        passing = tokens if kind in ("prefill", "decode") else self.counted(whole)
        head_s = timing.head_s(kind, passing, context)
        if kind == "backward" and self.has_adapters:  # the frozen embedding and lm head have no gradient
            embedding_s, head_s = 0.0, head_s * (0.5 if self.local.vocab > 1 else 1.0)
        return layer_s, embedding_s, head_s

    def _to_heads_s(self, tokens: float) -> float:
        """Seconds in which a layer's queries, keys and values go to the cp ranks of their heads, and the output comes
        back. tokens: of one rank

        Where an all-to-all has no price of its own, it takes as long as an all-gather that fills as many bytes: each
        rank sends and receives as much.
        """
        if self.strategy.cp == 1:
            return 0.0
        there = tokens * (self.local.scored + 2 * self.attended_kv) * self.workload.itemsize
        back = tokens * self.local.scored * self.workload.itemsize
        return sum(
            self.exchange_s("all_gather", self.strategy.cp, size_bytes, self.crossings.cp)
            for size_bytes in (there, back)
        )

    @property
    def attended_kv(self) -> float:
        """Width of a layer's keys with which a cp rank attends, for each of its own tokens: each rank has one KV head
        at least."""
        cp, local = self.strategy.cp, self.local
        return local.kv if cp == 1 else max(local.kv, cp * local.head_dim)

    def counted(self, tokens: float) -> float:
        """How many of these tokens pass the head: of a language model, only those that predict a counted token.

        tokens  of a rank. Of cp ranks the last ones have a micro-batch's answers: the fullest one may have all of
                these, and has no more than its tokens
        """
        if self.local.vocab == 1:
            return tokens
        return min(tokens, self.strategy.cp * tokens * self.workload.counted_share)

    @property
    def has_adapters(self) -> bool:
        return self.trained is not self.local

    def _layer_factor(self, kind: Pass, tokens: float, context: float) -> float:
        """FLOPs of a layer's pass with adapters, divided by those of the pass without, for which there are times.

        A backward pass computes no gradients of frozen matrices, which are as much work as their products.
        """
        if not self.has_adapters:
            return 1.0
        attended = context if kind == "decode" else context / 2
        forward = layer_flops(tokens, attended, self.local.active, self.local.scored, self.local.state)
        frozen, adapters = (layer_flops(tokens, 0, size.active, 0) for size in (self.local, self.trained))
        if kind == "backward":
            return (2 * forward - frozen + 2 * adapters) / (2 * forward)
        return (forward + adapters) / forward

    def pipelined_s(
        self, kinds: Sequence[Pass], tokens: float, context: float, micro_batches: int, repeated: float = 0.0
    ) -> float:
        """Seconds of all micro-batches through all stages: the first fills the pipeline, then the slowest stage
        sets the pace. repeated: as in `stages_s`"""
        stages, sends = self.stages_s(kinds, tokens, context, repeated), self.pass_on_s(tokens)
        return sum(stages) + (self.strategy.pp - 1) * sends + (micro_batches - 1) * (max(stages) + sends)

    def share_batch_s(self, call: ModelFunctionCall, tokens: float) -> float:
        """Seconds in which a replica's head shares a batch of `tokens` tokens with the replica's ranks."""
        ranks = self.strategy.size // self.strategy.dp
        size_bytes = len(call.inputs) * tokens * TOKEN_BYTES
        crosses = self.crossings.tp or self.crossings.pp or self.crossings.cp
        return self.exchange_s("share", ranks, size_bytes, crosses)

    def kept_bytes(self, recompute: Recompute) -> float:
        """Bytes per token that a layer keeps for the backward pass, by what is recomputed there.

        full       its input; with experts also 4 bytes for each copy of a token
        selective  its input, and the outputs of its products and of attention; with experts the output of each
        none       all that it computes with: in float32 the input of each of its two norms, and the same normalised;
                   the inputs of its products (outputs of both norms and of attention, the gated activation); rotated
                   queries and keys, and values; attention's output; gate, its activation, and up. With experts also
                   their copies of the hidden state, and the weighed gated activation. Without a gate: up and its
                   activation. A LayerNorm keeps its input as it is, not in float32. The gated delta rule is in
                   float32, too.
        """
        local, itemsize = self.local, self.workload.itemsize
        if recompute == "full":
            return local.hidden * itemsize + COPY_BYTES * local.routed / local.hidden
        if recompute == "selective":
            outputs = 2 * local.hidden + (local.routed or local.hidden)
            branches = (2 if local.gated else 1) * local.intermediate
            return (outputs + 2 * local.query + 2 * local.kv + branches) * itemsize
        of_mlp = (4 if local.gated else 2) * local.intermediate
        products = 2 * local.hidden + 3 * local.query + 2 * self.attended_kv + of_mlp
        if local.routed:
            products += local.routed + local.intermediate
        norms = 2 * local.hidden * itemsize if local.norm_bias else 4 * local.hidden * NORM_BYTES
        return norms + products * itemsize + local.mixing * STATE_BYTES + self.scores_bytes(self.length)

    def scores_bytes(self, context: float) -> float:
        """Bytes of the scores of a token with `context` others, where they stand in memory: as probabilities in
        float32 or wider, and once more in 16 bits where that is the model's dtype; a byte for the mask of all heads.

        With cp, a rank's heads have the tokens of all ranks: for one of its own as many scores, and more masks.
        """
        if not self.local.in_memory:
            return 0.0
        itemsize = self.workload.itemsize
        of_score = SCORE_BYTES + itemsize if itemsize < SCORE_BYTES else itemsize
        return context * (self.local.in_memory * of_score + self.strategy.cp * MASK_BYTES)

    def repeated_bytes(self) -> float:
        """Bytes of a layer's keys and values of a token that is repeated for another sequence."""
        return 2 * self.attended_kv * self.workload.itemsize

    def working_bytes(self, tokens: float, stage: int, gradients: bool, repeated: float = 0.0) -> float:
        """Bytes of temporary tensors: the larger of one layer's and, on the last stage, the head's: logits, and what
        their log-probabilities take, a few rows at a time. repeated: as in `stages_s`"""
        of_layer = self.layer_working_bytes(tokens, gradients, repeated, self.length)
        if stage < self.strategy.pp - 1:
            return of_layer
        logits = self.counted(tokens + repeated) * self.local.vocab
        of_head = logits * self.workload.itemsize * (2 if gradients else 1)
        if self.local.vocab > 1:
            of_head += min(logits, LOGITS_AT_ONCE[self.device_type]) * LOGPROB_BYTES
        return max(of_layer, of_head)

    def layer_working_bytes(self, tokens: float, gradients: bool, repeated: float, context: float) -> float:
        """Bytes of one layer's temporary tensors: in a backward pass its gradients, and what is recomputed.

        With experts the larger of two moments counts: inputs with the products of the branches (one in float32), or
        inputs and outputs, joined and sorted. That is for one kernel for all experts, or for one expert that gets
        every token. repeated: as in `stages_s`; context: tokens of a sequence
        """
        local, itemsize = self.local, self.workload.itemsize
        mlp = 3 * local.intermediate
        if local.routed:
            mlp = max(4 * local.routed, local.routed + 4 * local.intermediate)
        layer = tokens * (4 * local.hidden + 2 * local.query + 2 * local.kv + mlp) * itemsize
        layer += tokens * (local.mixing * STATE_BYTES + self.scores_bytes(context))
        layer += repeated * self.repeated_bytes()
        if self.strategy.cp > 1:  # what is sent to the ranks of its heads, and what comes
            layer += 2 * tokens * (local.query + 2 * self.attended_kv) * itemsize
        if gradients:
            layer *= 2
            layer += tokens * (self.kept_bytes("none") - self.kept_bytes(self.workload.recompute))
        return layer
