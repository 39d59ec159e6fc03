"""What a call of each kind costs on one mesh.

The formulas follow the engine: pipeline.py (1F1B), gradients.py (ZeRO-2, float32), optimizer.py (master weights),
micro_batch.py (samples share a prompt), generation.py (as many groups in flight as stages), slots.py (sequences leave
and enter), kv_cache.py. All figures are per device, in seconds and bytes. The slowest stage and the fullest tp rank
decide. The terms of the formulas, such as the seconds of a layer, come from a profile (planner/pricing/rooflines.py).

Where an environment answers turn by turn (docs/adr/0021-turns.md), each turn is a generation of its own, whose prompt
is all that is there before it: prompt, turns and observations are read anew. Then all of a rank's sequences wait for
their environments.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from prefect_rlhf.planner.plan.workload import Lengths, Workload, fullest_share
from prefect_rlhf.planner.pricing.figures import Factor
from prefect_rlhf.planner.pricing.rooflines import GRADIENT_BYTES, STATE_BYTES, Sizes, Timing, stage_kinds
from prefect_rlhf.planner.pricing.segments import drawn
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import Recompute
from prefect_rlhf.rlhf_tasks.parallel.layout.shares import Gathering
from prefect_rlhf.rlhf_tasks.parallel.layout.state_layout import BUCKET
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy
from prefect_rlhf.rlhf_tasks.parallel.layout.work import (
    LEAST_SHARED,
    LOGITS_AT_ONCE,
    PREFILL_TOKENS,
    REFILL_SHARE,
    layer_flops,
    rows_at_once,
    slots_of,
)
from prefect_rlhf.rlhf_tasks.profiling.measurements import Exchange, Pass
from prefect_rlhf.rlhf_tasks.spec import ModelFunctionCall

REWORK = 0.1
"""Share of a layer's forward pass that its backward pass repeats under selective recomputation: norms, activations
and other memory traffic. For Llama 7B on an A100 .06, by its traffic; on a CPU core .04 to .17 at hidden sizes of 768
and 2048 (bfloat16, float32), and more below, where Python sees each operator of both passes."""

COPY_BYTES = 4  # what stays of each copy of a token for an expert: the token's number
SCORE_BYTES, MASK_BYTES = (
    4,
    1,
)  # of a score in memory: its softmax is in float32 whatever the dtype (attention.py)
NORM_BYTES = 4  # of an element inside a norm, which computes in float32 whatever the weights are
DRAWN_BYTES = 16  # of a logit that is being drawn from: its float64 score and the sum up to it (sampling.py)
LOGPROB_BYTES = 8  # of a logit whose log-probability is being computed: two float32 copies (logprobs.py)
NUCLEUS_BYTES = 96  # of one among which a nucleus is sought: measured 54 to 94 (bench/results/engine.md)
MATRICES = 7  # of a layer of Llama's kind
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


def infer(mesh: OnMesh, call: ModelFunctionCall, micro_batches: int) -> CallCost:
    """A forward pass. Python rewards run at the same time, each head's sequences one by one; or they run alone."""
    length, share, prompt = mesh.workload.mean_tokens, mesh.share(call), mesh.workload.prompt_tokens
    micro_batches = mesh.micro_batches(share, micro_batches, mesh.alike(call))
    prompts, most = mesh.prompts(share, micro_batches, mesh.alike(call))
    in_each, fullest = share / micro_batches, -(-share // micro_batches)
    repeated, of_fullest = (
        (sequences - computed) * prompt + sequences * mesh.shared
        for sequences, computed in ((in_each, prompts), (fullest, most))
    )
    scores = "scores" in (call.remap.get(key, key) for key in call.outputs)
    rewards_s = share * mesh.workload.reward_s if scores else 0.0
    if not call.runs_model:
        return CallCost(rewards_s, (0.0,) * mesh.strategy.pp)
    cp = mesh.strategy.cp
    passes_s = mesh.pipelined_s(
        ["forward"], (in_each * length - repeated) / cp, mesh.length, micro_batches, repeated / cp
    )
    seconds = mesh.share_batch_s(call, share * length) + passes_s
    if mesh.gathered is not None:
        seconds += micro_batches * mesh.waits_s(passes_s / micro_batches)
    working = mesh.each_stage(
        lambda stage: mesh.at(stage).working_bytes(
            (fullest * length - of_fullest) / cp, stage, False, of_fullest / cp
        )
    )
    return CallCost(max(seconds, rewards_s), tuple(of_stage + mesh.whole_bytes for of_stage in working))


def train(mesh: OnMesh, call: ModelFunctionCall, micro_batches: int) -> CallCost:
    """An optimizer step per mini-batch and epoch.

    Micro-batches hold whole sequences, and memory is that of the fullest ones: of 5 sequences in 4 micro-batches, the
    first holds 2.
    """
    workload, s, alike = mesh.workload, mesh.strategy, mesh.alike(call)
    length, prompt, share = workload.mean_tokens, workload.prompt_tokens, mesh.share(call, call.mini_batches)
    micro_batches = mesh.micro_batches(share, micro_batches, alike)
    prompts, _ = mesh.prompts(share, micro_batches, alike)
    repeated = ((share / micro_batches - prompts) * prompt + share / micro_batches * mesh.shared) / s.cp
    tokens = share * length / micro_batches / s.cp - repeated
    gradients_back = (s.pp - 1 + micro_batches) * mesh.pass_on_s(tokens)
    passes_s = mesh.pipelined_s(["forward", "backward"], tokens, mesh.length, micro_batches, repeated)
    backward_s = max(mesh.stages_s(["backward"], tokens, mesh.length, repeated))
    step = passes_s + gradients_back + _reduce_s(mesh, micro_batches, backward_s) + _update_s(mesh)
    if mesh.gathered is not None:
        forward_s = max(mesh.stages_s(["forward"], tokens, mesh.length, repeated))
        step += micro_batches * mesh.waits_s(forward_s)

    share = fullest_share(call, s.dp)
    _, most = mesh.prompts(share, micro_batches, alike)

    def tokens_of(sequences: int, count: int) -> tuple[float, float]:
        """Tokens of `count` micro-batches that a rank computes, and that are repeated."""
        repeated = (sequences - min(sequences, count * most)) * prompt + sequences * mesh.shared
        return (sequences * length - repeated) / s.cp, repeated / s.cp

    of_token = mesh.each_stage(lambda stage: mesh.at(stage).kept_bytes(workload.recompute))
    of_repeated = mesh.each_stage(lambda stage: mesh.at(stage).repeated_bytes())

    def kept(stage: int) -> float:
        """Bytes that a layer keeps. 1F1B: of as many micro-batches as there are stages from this one to the last one;
        the first ones have a sequence more than the others."""
        count = min(s.pp - stage, micro_batches)
        sequences = count * (share // micro_batches) + min(count, share % micro_batches)
        tokens, repeated = tokens_of(sequences, count)
        return tokens * of_token[stage] + repeated * of_repeated[stage] * (workload.recompute == "none")

    fullest, repeated = tokens_of(-(-share // micro_batches), 1)
    working = mesh.each_stage(lambda stage: mesh.at(stage).working_bytes(fullest, stage, True, repeated))
    seconds = mesh.share_batch_s(call, mesh.share(call) * length)
    seconds += step * call.mini_batches * workload.epochs
    active = (
        mesh.layers(stage) * kept(stage) + besides + mesh.whole_bytes for stage, besides in enumerate(working)
    )
    return CallCost(seconds, tuple(active))


def unreduced(trained: Sizes, pp: int, stage: int) -> int:
    """The most gradients that a device of a stage holds before they are reduced over dp: those of rows that other
    ranks of its replica hold, too; two buckets, of which one is on its way; and while a layer's arrive, a third.
    """
    parameters, shared = trained.stage_parameters(pp, stage), trained.stage_shared(pp, stage)
    ends = [trained.embedding, trained.positions] * (stage == 0) + [trained.head] * (stage == pp - 1)
    largest = max(trained.layer, 2 * BUCKET, *ends)
    return shared + min(parameters - shared, 2 * largest)


def _reduce_s(mesh: OnMesh, micro_batches: int, backward_s: float) -> float:
    """Seconds by which the reduction of gradients over dp, after each micro-batch, lengthens a step; with it the
    gathering of sharded weights for backward passes.

    backward_s  of one micro-batch on the slowest stage; it hides a part of this, but not the last bucket's reduction
    """
    trained, copies, pp, crosses = mesh.trained, mesh.strategy.copies, mesh.strategy.pp, mesh.crossings.dp
    if copies == 1:
        return 0.0
    shared = max(mesh.each_stage(lambda stage: mesh.at(stage).trained.stage_shared(pp, stage)))

    def alone(stage: int) -> float:
        its = mesh.at(stage).trained
        return its.stage_parameters(pp, stage) - its.stage_shared(pp, stage)

    moved = max(mesh.each_stage(alone))
    buckets = max(1, round(moved / max(BUCKET, trained.layer / MATRICES)))
    bucket_s = mesh.exchange_s("reduce_scatter", copies, moved / buckets * GRADIENT_BYTES, crosses)
    exchanges_s = buckets * bucket_s + mesh.gather_s(back=True)
    passes_s = micro_batches * max(exchanges_s - mesh.overlap * backward_s, bucket_s)
    if not shared:
        return passes_s
    return passes_s + mesh.exchange_s("reduce_scatter", copies, shared * GRADIENT_BYTES, crosses)


def _update_s(mesh: OnMesh) -> float:
    """Seconds of an optimizer step after the reduction of gradients: update shares, gather weights."""
    s, itemsize, crossings = mesh.strategy, mesh.workload.itemsize, mesh.crossings
    parameters = max(mesh.each_stage(lambda stage: mesh.at(stage).trained.stage_parameters(s.pp, stage)))
    seconds = mesh.timing.update_s(parameters, s.copies)
    if mesh.gathered is None or mesh.has_adapters:
        seconds += mesh.exchange_s("all_gather", s.copies, parameters * itemsize, crossings.dp)
    if (
        mesh.has_adapters and s.tp > 1
    ):  # of each adapter, one matrix is on all tp ranks; with a large tp that is most
        seconds += mesh.exchange_s(
            "all_reduce", s.tp * s.copies, parameters * GRADIENT_BYTES, crossings.tp or crossings.dp
        )
    if mesh.trained.tied and s.pp > 1:
        seconds += mesh.exchange_s(
            "all_reduce", 2 * s.copies, mesh.trained.embedding * GRADIENT_BYTES, crossings.pp or crossings.dp
        )
    if s.copies * s.pp > 1:  # the ranks exchange their metrics
        seconds += mesh.exchange_s("all_gather", s.size, 0, any(crossings))
    return seconds


def generate(mesh: OnMesh, call: ModelFunctionCall, micro_batches: int) -> CallCost:
    """Prompts are read, each once for its group of samples; then a token per step for every sequence in a slot.

    There are as many groups in flight as stages. While sequences wait for a slot, some slots are empty, because freed
    slots are refilled several at a time. When no sequence waits any more, the slots empty one by one.
    """
    workload = mesh.workload
    if call.segment_tokens is not None:
        return _generate_in_segments(mesh, call, call.segment_tokens, micro_batches)
    pp, share = mesh.strategy.pp, mesh.share(call)
    groups = min(pp, share)
    slots = slots_of(-(-share // groups), micro_batches)
    at_once = min(groups * slots, share)
    prompts, prompt = share // call.group_size, workload.prompt_tokens
    refills = REFILL_SHARE * (-(-share // at_once) - 1)
    passes = max(min(groups * (1 + refills), prompts), math.ceil(prompts * prompt / PREFILL_TOKENS))
    seconds = mesh.share_batch_s(call, share * prompt)
    seconds += mesh.pipelined_s(["prefill"], prompts * prompt / passes, prompt, passes)
    lengths = workload.new_tokens
    if share > at_once:
        taken = at_once * (1 - 1 / (2 * REFILL_SHARE)) if slots > 1 else at_once
        # At a random step a sequence is in a slot by its length, and halfway through.
        halfway = sum(tokens**2 * part for tokens, part in lengths.points) / lengths.mean / 2
        seconds += _steps_s(mesh, groups, (share - at_once) * lengths.mean / taken, taken, prompt + halfway)
    for first, last, running in lengths.spans():
        steps, context = last - first + 1, prompt + (first + last) / 2
        seconds += _steps_s(mesh, groups, steps, at_once * running, context)
    read = min(-(-slots // call.group_size) * prompt, PREFILL_TOKENS)
    return CallCost(seconds, _generation_bytes(mesh, at_once, slots, read))


def _generate_in_segments(
    mesh: OnMesh, call: ModelFunctionCall, segment: int, micro_batches: int
) -> CallCost:
    """Unfinished responses are prefilled together with new prompts, then all are decoded in rounds.

    With fewer slots than sequences, the sequences take turns in each round. In every round after the first they are
    prefilled again.
    """
    workload, share = mesh.workload, mesh.share(call)
    now = drawn(workload.prompt_tokens, workload.new_tokens.points, segment, call.n_groups, call.group_size)
    places = 2 * share
    groups = min(mesh.strategy.pp, places)
    slots = slots_of(-(-places // groups), micro_batches)
    turns = -(-places // (groups * slots))
    reads, read_tokens, entries = share * now.reads, share * now.reads * now.read_tokens, 1.0
    if turns > 1:
        reads += share * now.again
        read_tokens += share * now.again * now.again_tokens
        entries = len(now.rounds) * (1 + REFILL_SHARE * (turns - 1))
    passes = math.ceil(max(min(groups * entries, reads), read_tokens / PREFILL_TOKENS))
    seconds = mesh.share_batch_s(call, places * workload.mean_tokens)
    seconds += mesh.pipelined_s(["prefill"], read_tokens / passes, read_tokens / reads, passes)
    for one in now.rounds:
        # While others wait for a slot, nearly all are taken; those that come last leave one by one.
        taken = share * one.begins / turns * (1 - 1 / (2 * REFILL_SHARE))
        waiting = share * one.running * one.steps * (1 - 1 / turns)  # tokens that are drawn before
        seconds += _steps_s(mesh, groups, waiting / taken, taken, one.context)
        seconds += _steps_s(mesh, groups, one.steps, share * one.running / turns, one.context)
    read = math.ceil(min(slots * now.read_tokens, PREFILL_TOKENS))
    return CallCost(seconds, _generation_bytes(mesh, min(groups * slots, places), slots, read))


def _steps_s(mesh: OnMesh, groups: int, steps: float, sequences: float, context: float) -> float:
    """Seconds of decoding steps of so many sequences, in so many groups in flight."""
    rows = max(sequences / groups, 1.0)
    stages = mesh.stages_s(["decode"], rows, context)
    message = mesh.pass_on_s(rows)  # hidden states; sending the sampled tokens takes about as long
    # Per token, either a stage that serves all groups in turn is the bottleneck, or one group's round trip:
    # its next token needs the previous one.
    return steps * max(groups * (max(stages) + 2 * message), sum(stages) + mesh.strategy.pp * message)


def _generation_bytes(mesh: OnMesh, at_once: int, slots: int, read_tokens: float) -> tuple[float, ...]:
    """[stages] bytes of the cache of `at_once` sequences, and of what a pass over prompts or a step needs."""
    workload = mesh.workload

    def active(stage: int) -> float:
        here, local = mesh.at(stage), mesh.at(stage).local
        of_sequence = workload.cache_tokens * 2 * local.cached * workload.itemsize + local.state * STATE_BYTES
        cache = at_once * of_sequence * mesh.layers(stage)
        logits = slots * local.vocab if stage == mesh.strategy.pp - 1 else 0
        drawing = logits * workload.itemsize + _drawing_bytes(mesh, logits)
        reading = here.layer_working_bytes(read_tokens, False, 0.0, workload.prompt_tokens)
        return cache + max(reading, drawing, slots * here.scores_bytes(workload.cache_tokens))

    return tuple(mesh.each_stage(active))


def _drawing_bytes(mesh: OnMesh, logits: float) -> float:
    """Bytes that drawing from so many logits takes besides them: a few rows at a time (sampling.py).

    top-k leaves a copy without the unlikely ones, and the mask. A search for the nucleus has a third of the rows.
    """
    workload, vocab = mesh.workload, mesh.local.vocab
    rows = rows_at_once(vocab, workload.top_p, mesh.device_type)
    of_each = NUCLEUS_BYTES if workload.top_p else DRAWN_BYTES
    if workload.top_k:
        of_each += workload.itemsize + 1
    return min(logits, rows * vocab) * of_each


def turns_of(workload: Workload) -> list[Workload]:
    """The workload of each turn: a response has equal parts in all of them."""
    turns, lengths = workload.turns, workload.new_tokens
    shares = defaultdict[int, float](float)
    for tokens, share in lengths.points:
        shares[-(-tokens // turns)] += share
    part = Lengths(points=tuple(sorted(shares.items())))
    found = list[Workload]()
    for turn in range(turns):
        context = workload.prompt_tokens + round(lengths.mean * turn / turns)
        room = max(part.longest, workload.cache_tokens - context)
        sizes = {"prompt_tokens": context, "longest_prompt": None, "new_tokens": part, "max_new_tokens": room}
        changed = {**sizes, "turns": 1}
        found.append(workload.model_copy(update=changed))
    return found


def generate_in_turns(mesh: OnMesh, call: ModelFunctionCall, micro_batches: int) -> CallCost:
    """The cost of a generation of `workload.turns` turns, each followed by `workload.environment_s` seconds.

    The samples of a group share the reading of their prompt alone: from the second turn on, each has a context of its
    own.
    """
    workload = mesh.workload
    if workload.turns == 1:
        cost = generate(mesh, call, micro_batches)
        return replace(cost, seconds=cost.seconds + workload.environment_s)
    each = mesh.share(call) * mesh.strategy.dp * call.chunks
    alone = call.model_copy(update={"group_size": 1, "n_seqs": each})
    costs = [
        generate(replace(mesh, workload=turn), alone if number else call, micro_batches)
        for number, turn in enumerate(turns_of(workload))
    ]
    seconds = sum(cost.seconds for cost in costs) + workload.turns * workload.environment_s
    stages = zip(*(cost.active_bytes for cost in costs), strict=True)
    return CallCost(seconds, tuple(map(max, stages)))


def generate_beside(
    mesh: OnMesh, call: ModelFunctionCall, cached: float, weights: int, take_s: float
) -> CallCost:
    """The cost of a generation by another engine: seconds as of our own, in as many parts as its keys and values
    leave no room for at once, and those in which it takes the weights; its memory instead of ours.

    cached   bytes of a token's keys and values in all layers
    weights  bytes of the whole model
    take_s   seconds in which the weights are handed over
    On a host without GPUs the engine of a replica is one process beside its head, so all counts at the first stage.
    """
    other, stages, parts = mesh.workload.other, mesh.strategy.pp, 1
    assert other is not None, "the ranks draw"
    ranks = mesh.strategy.tp * stages if mesh.gpus else 1
    if other.kv_bytes is not None:
        of_sequence = mesh.workload.cache_tokens * cached / ranks
        parts = -(-mesh.share(call) // max(1, int(other.kv_bytes // of_sequence)))
    seconds = generate_in_turns(mesh, call, parts).seconds + take_s
    if not mesh.gpus:
        return CallCost(seconds, (other.copies * weights + (other.kv_bytes or 0), *(0.0,) * (stages - 1)))
    return CallCost(seconds, (weights / ranks + other.kv_bytes if other.kv_bytes else 0.0,) * stages)
