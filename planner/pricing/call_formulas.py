"""What a call of each kind costs on one mesh.

The formulas follow the engine: pipeline.py (1F1B), gradients.py (ZeRO-2, float32), optimizer.py (master weights),
micro_batch.py (samples share a prompt), generation.py (as many groups in flight as stages), slots.py (sequences leave
and enter), kv_cache.py. All figures are per device, in seconds and bytes. The slowest stage and the fullest tp rank
decide. The terms of the formulas, such as the seconds of a layer, come from a profile (planner/pricing/rooflines.py).

Where an environment answers turn by turn (docs/adr/0042-turns-apart.md), nothing is read twice, and observations are
read as fast as tokens are drawn.
"""

import math
from dataclasses import replace

from prefect_rlhf.planner.plan.workload import Lengths, Workload, fullest_share
from prefect_rlhf.planner.pricing.rooflines import GRADIENT_BYTES, STATE_BYTES, Sizes
from prefect_rlhf.planner.pricing.segments import drawn
from prefect_rlhf.planner.pricing.terms import CallCost, OnMesh
from prefect_rlhf.rlhf_tasks.parallel.layout.state_layout import BUCKET
from prefect_rlhf.rlhf_tasks.parallel.layout.work import (
    BLOCK,
    PREFILL_TOKENS,
    READ_AT_ONCE,
    REFILL_SHARE,
    blocks_of,
    pool_of,
    rows_at_once,
    rows_of,
    shared_blocks,
    slots_of,
)
from prefect_rlhf.rlhf_tasks.spec import ModelFunctionCall

DRAWN_BYTES = 16  # of a logit that is being drawn from: its float64 score and the sum up to it (sampling.py)
NUCLEUS_BYTES = 96  # of one among which a nucleus is sought: measured 54 to 94 (bench/results/engine.md)
MATRICES = 7  # of a layer of Llama's kind


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

    There are as many groups in flight as stages. While sequences wait, some room of the cache is empty, because
    several enter at a time. When no sequence waits any more, those that are decoded end one by one.
    """
    workload = mesh.workload
    if call.segment_tokens is not None:
        return _generate_in_segments(mesh, call, call.segment_tokens, micro_batches)
    pp, share = mesh.strategy.pp, mesh.share(call)
    groups = min(pp, share)
    states = mesh.local.state > 0
    at_once = decoded_at_once(workload, share, groups, call.group_size, micro_batches, states)
    prompts, prompt = share // call.group_size, workload.prompt_tokens
    refills = REFILL_SHARE * (-(-share // at_once) - 1)
    passes = max(min(groups * (1 + refills), prompts), math.ceil(prompts * prompt / PREFILL_TOKENS))
    seconds = mesh.share_batch_s(call, share * prompt)
    seconds += mesh.pipelined_s(["prefill"], prompts * prompt / passes, prompt, passes)
    lengths = workload.new_tokens
    if share > at_once:
        taken = at_once * (1 - 1 / (2 * REFILL_SHARE)) if at_once > groups else at_once
        context = prompt + _halfway(lengths)
        seconds += _steps_s(mesh, groups, (share - at_once) * lengths.mean / taken, taken, context)
    for first, last, running in lengths.spans():
        steps, context = last - first + 1, prompt + (first + last) / 2
        seconds += _steps_s(mesh, groups, steps, at_once * running, context)
    read = min(-(-at_once // (groups * call.group_size)) * prompt, PREFILL_TOKENS)
    return CallCost(seconds, _generation_bytes(mesh, share, groups, call.group_size, micro_batches, read))


def decoded_at_once(
    workload: Workload, share: int, groups: int, group_size: int, micro_batches: int, states: bool = False
) -> int:
    """Sequences that are decoded at a time while others wait: as many as the cache is expected to have room for.

    Those that are decoded are taken to get as much longer as a response is on average (slots.py). At a random step a
    sequence is among them by its length, and halfway through.

    share   sequences, in so many groups in flight; group_size: those of a prompt
    states  whether layers keep states
    """
    in_group, lengths, longest = -(-share // groups), workload.new_tokens, workload.longest_response
    slots = slots_of(in_group, micro_batches)
    prompt = (workload.longest_prompt or workload.prompt_tokens) / group_size
    expected = prompt + min(longest, _halfway(lengths) + lengths.mean)
    fit = max(slots, int(slots * (prompt + longest) / expected))
    return min(share, groups * min(fit, rows_of(in_group, micro_batches, states)))


def _halfway(lengths: Lengths) -> float:
    """Tokens that a sequence has on average at a random step."""
    return sum(tokens**2 * part for tokens, part in lengths.points) / lengths.mean / 2


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
    return CallCost(seconds, _generation_bytes(mesh, places, groups, 1, micro_batches, read))


def _steps_s(mesh: OnMesh, groups: int, steps: float, sequences: float, context: float) -> float:
    """Seconds of decoding steps of so many sequences, in so many groups in flight."""
    rows = max(sequences / groups, 1.0)
    stages = mesh.stages_s(["decode"], rows, context)
    message = mesh.pass_on_s(rows)  # hidden states; sending the sampled tokens takes about as long
    # Per token, either a stage that serves all groups in turn is the bottleneck, or one group's round trip:
    # its next token needs the previous one.
    return steps * max(groups * (max(stages) + 2 * message), sum(stages) + mesh.strategy.pp * message)


def _generation_bytes(
    mesh: OnMesh, share: int, groups: int, group_size: int, micro_batches: int, read_tokens: float
) -> tuple[float, ...]:
    """[stages] bytes of the cache of so many sequences in groups in flight, of what is copied of it at a time, and of
    what a pass over prompts or a step needs. group_size: sequences that share a prompt"""
    workload, states = mesh.workload, mesh.local.state > 0
    longest = blocks_of(workload.cache_tokens - 1)
    blocks = blocks_of_cache(workload, share, groups, group_size, micro_batches)
    slots = slots_of(-(-share // groups), micro_batches)
    rows = rows_of(-(-share // groups), micro_batches, states)

    def active(stage: int) -> float:
        here, local = mesh.at(stage), mesh.at(stage).local
        of_token = 2 * local.cached * workload.itemsize
        of_states = min(groups * slots, share) * local.state * STATE_BYTES
        cache = (blocks * BLOCK * of_token + of_states) * mesh.layers(stage)
        of_row = longest * BLOCK * of_token
        # What is attended to is copied in parts, and the one before is still there. A CPU may attend to a part of
        # bfloat16 in float32 (attention.py), when the one before is gone.
        part = max(READ_AT_ONCE[mesh.device_type], of_row)
        gathered = min(rows * of_row, 2 * part)
        if mesh.device_type == "cpu" and workload.itemsize == 2:
            gathered = 3 * min(rows * of_row, part)
        logits = rows * local.vocab if stage == mesh.strategy.pp - 1 else 0
        drawing = logits * workload.itemsize + _drawing_bytes(mesh, logits)
        reading = here.layer_working_bytes(read_tokens, False, 0.0, workload.prompt_tokens)
        attending = gathered + slots * here.scores_bytes(workload.cache_tokens)
        return cache + max(reading, drawing, attending)

    return tuple(mesh.each_stage(active))


def blocks_of_cache(
    workload: Workload, share: int, groups: int, group_size: int, micro_batches: int
) -> float:
    """Blocks of the cache of so many sequences in groups in flight, each of which has one that nobody reads.

    Where prompts are fewer than groups, their samples are cut, and each group has a copy of its own.
    """
    longest = blocks_of(workload.cache_tokens - 1)
    shared = shared_blocks(workload.longest_prompt or workload.prompt_tokens)
    copies = share if workload.agents else min(share, max(-(-share // group_size), groups))
    return pool_of(share * longest - (share - copies) * shared, groups * longest, micro_batches) + groups


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


def generate_in_turns(mesh: OnMesh, call: ModelFunctionCall, micro_batches: int) -> CallCost:
    """The cost of a generation whose turns environments answer.

    Where all wait for all, those that are drawn last in a turn wait for the longest answer to any of them; answers
    before come while others are drawn. Else work hides all thinking but that of the longest response, whose tokens
    are drawn together with as many others as do not wait then.
    """
    cost, workload, thinking = generate(mesh, call, micro_batches), mesh.workload, mesh.workload.thinking
    if thinking is None:
        return cost
    share = mesh.share(call)
    groups = min(mesh.strategy.pp, share)
    states = mesh.local.state > 0
    at_once = decoded_at_once(workload, share, groups, call.group_size, micro_batches, states)
    if thinking.together:
        return replace(cost, seconds=cost.seconds + thinking.longest_of(at_once))
    context, steps = workload.prompt_tokens + _halfway(workload.new_tokens), workload.new_tokens.longest
    drawn_s = _steps_s(mesh, groups, steps, at_once, context)
    beside = min(at_once, share * drawn_s / (drawn_s + thinking.mean_s))
    alone_s = _steps_s(mesh, groups, steps, beside, context) + thinking.longest_of(share)
    return replace(cost, seconds=max(cost.seconds, alone_s))


def generate_beside(
    mesh: OnMesh, call: ModelFunctionCall, cached: float, kv_heads: int, weights: int
) -> CallCost:
    """The cost of a generation by another engine that has the weights: seconds as of our own, in as many parts as its
    keys and values leave no room for at once; its memory instead of ours.

    cached    bytes of a token's keys and values in all layers
    kv_heads  their heads in a layer: more ranks have copies of them
    weights   bytes of the whole model
    On a host without GPUs the engine's processes are beside the head of the replica: all counts at the first stage.
    """
    other, stages, parts = mesh.workload.other, mesh.strategy.pp, 1
    assert other is not None, "the ranks draw"
    ranks = mesh.strategy.tp * stages
    if other.kv_bytes is not None:
        of_sequence = mesh.workload.cache_tokens * cached / min(ranks, kv_heads)
        parts = -(-mesh.share(call) // max(1, int(other.kv_bytes // of_sequence)))
    seconds = generate_in_turns(mesh, call, parts).seconds
    if not mesh.gpus:
        in_all = other.copies * weights + ranks * (other.kv_bytes or 0)
        return CallCost(seconds, (in_all, *(0.0,) * (stages - 1)))
    copies = 1 if mesh.trained is mesh.local else 2  # weights with adapters added are handed over
    here = copies * weights / ranks + other.kv_bytes if other.kv_bytes else 0.0
    return CallCost(seconds, (here,) * stages)
