"""Generation: one decode loop for any (dp, tp, pp), with a static KV cache, on packed prompts.

The sequences of a dp rank are decoded in groups. A pipeline stage takes the groups in turn, so with as many groups
as stages none idles: while stage 1 computes group 0, stage 0 computes group 1. Hidden states are sent to the next
stage point to point; the last stage samples and broadcasts the tokens over the pipeline. Each stage thus knows every
token before it computes the next one. From the tokens alone each stage derives which sequences have finished, which
enter in their place, and which shapes come next, so no other communication is needed. Where responses have turns, the
head also says, at each check, which of them have been answered.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import balance
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.generate.places import BEFORE, BEGUN, MOST, Drawing, same_prompts
from prefect_rlhf.rlhf_tasks.parallel.generate.sampling import SamplingParams
from prefect_rlhf.rlhf_tasks.parallel.generate.slots import Group
from prefect_rlhf.rlhf_tasks.parallel.generate.turns import Turns
from prefect_rlhf.rlhf_tasks.parallel.layout.work import PREFILL_TOKENS, generation_flops
from prefect_rlhf.rlhf_tasks.parallel.model.products import PackedWeights, can_pack, products
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from prefect_rlhf.rlhf_tasks.system.failpoints import Point, reach
from prefect_rlhf.rlhf_tasks.system.interruption import leave_if_ended

PACK_FROM_STEPS = 12  # packing the weights costs about what it saves in 5 steps
ANSWER_S = 0.1  # that a rank waits for an answer before it looks whether it is still wanted


class Segments(NamedTuple):
    """Responses are drawn segment after segment, until there are enough.

    tokens  most tokens that are drawn of a response in a segment; with turns a segment is a turn of all, which are
            answered together
    enough  whether no further segment is drawn: asked on all ranks after each, with the ids of the replica's samples
            that have ended by then. It says True at the latest when all have
    """

    tokens: int
    enough: Callable[[Sequence[int]], bool]


@torch.inference_mode()
def generate(
    engine: Engine,
    batch: SampleBatch,
    params: SamplingParams,
    seed: int,
    iteration: int,
    purpose: str = "rollout",
    groups_in_flight: int | None = None,
    record_kept: bool = False,
    micro_batches: int = 1,
    prefill_tokens: int = PREFILL_TOKENS,
    segments: Segments | None = None,
    turns: Turns | None = None,
    on_ended: Callable[[int, Sequence[int]], None] | None = None,
) -> SampleBatch | None:
    """Sample one response per prompt. All ranks of a replica (one dp rank) call it together.

    batch             this dp rank's samples, with the key `prompt_ids`; no prompt may be empty, the batch may be.
                      With turns an empty one is a place where partners begin sequences, one after the other, of which
                      the last is returned. Where responses continue, `prompt_ids` ends with what was drawn of them,
                      and there are the keys BEFORE and BEGUN of places.py. MOST says of each what it may have of
                      `max_new_tokens`
    seed, iteration, purpose  together with sample id and position, they determine the random number of each token
    groups_in_flight  groups into which the batch is cut; None: one per pipeline stage
    record_kept       also record which tokens could be drawn, for each token of a response
    micro_batches     a group of n sequences has n / micro_batches slots, rounded up: so many are decoded at a time,
                      and the cache has room for as many of the longest prompt and response. Where a sequence has
                      finished, the next one enters
    prefill_tokens    most tokens of a pass over prompts; longer prompts are cut
    segments          how far responses are drawn now; None: to their ends. Between segments the cache stays, unless
                      there are fewer slots than sequences
    turns             how responses are drawn turn by turn; None: at once. Then `max_new_tokens` counts observations,
                      too, `min_new_tokens` are those of a turn, and `truncated` is about the last one
    on_ended          on the head, gets each sample's id and what was drawn of it as soon as it has ended, while
                      others are drawn; not with turns, whose partners hear of each

    Returns None, except on the head: there the samples with these keys, L being the tokens of a sample:
        input_ids      [L] int64: prompt and response; the response includes the token that ended it
        response_mask  [L] bool: True on the response, but for observations
        old_logprobs   [L] float32 (float64 in float64 runs): under the distribution drawn from; 0 on the prompt
        truncated      [1] bool: the response reached max_new_tokens, or the end of the last segment, without a stop
                       id or a stop string
    with record_kept also
        kept_counts    [L] int32: how many tokens could be drawn; -n where all but n could; 0 on the prompt
        kept_tokens    [sum(|kept_counts|)] int32: their ids, or of the n, position after position
    Layout and batch influence tokens only by rounding: a token can differ where its uniform random number is within
    rounding error of the border between two tokens. Raises ValueError for an empty prompt and, on the last stage, for
    logits that are not finite.
    """
    empty = [i for i, n in zip(batch.ids, batch["prompt_ids"].lengths, strict=True) if n == 0]
    if empty and turns is None:
        raise ValueError(f"samples {empty[:4]} have empty prompts: there is nothing to predict from.")
    segment_tokens = segments.tokens if segments else None
    stage = engine.stage
    pays = params.max_new_tokens >= PACK_FROM_STEPS and can_pack(stage.device, stage.dtype)
    with PackedWeights() if pays else products(stage.device, stage.dtype):
        prompts = _begun(batch, iteration, params).to(engine.device)
        drawing = Drawing(
            params,
            seed,
            purpose,
            segment_tokens,
            record_kept,
            micro_batches,
            prefill_tokens,
            turns,
            on_ended if engine.is_head and turns is None else None,
        )
        parts = _dealt(batch["prompt_ids"], groups_in_flight or engine.placement.strategy.pp)
        groups = [Group(engine, prompts.take(part), drawing) for part in parts]
        _decode(groups)
        while segments and not segments.enough([sample for group in groups for sample in group.ended()]):
            for group in groups:
                group.next_segment()
            _decode(groups)
    if not engine.is_head:
        return None
    answered = _assemble(batch, groups, engine.dtype_of_rows, record_kept)
    forgotten = [each for group in groups for each in group.forgotten]
    lengths = [
        length for length in (*answered["input_ids"].lengths, *(each for each, _ in forgotten)) if length
    ]
    new_tokens = int(answered["response_mask"].values.sum()) + sum(drawn for _, drawn in forgotten)
    engine.count(generation_flops(engine.layout.shape, lengths, new_tokens, engine.layout.lora))
    return answered


def stream(
    engine: Engine, prompt_ids: Sequence[int], params: SamplingParams, seed: int, sample: int = 0
) -> Iterator[int]:
    """The tokens of one response as they are drawn: those that `generate` gives the sample in iteration 0, all ranks
    of the replica being one. Between two of them others may use the device. Raises ValueError as `generate` does."""
    prompt = torch.tensor(list(prompt_ids), dtype=torch.int64)
    if not len(prompt):
        raise ValueError("an empty prompt: there is nothing to predict from.")
    batch = SampleBatch((sample,), {"prompt_ids": Packed.of([prompt])})
    drawing = Drawing(params, seed, "rollout", None, False, 1, PREFILL_TOKENS)
    with torch.inference_mode():
        group = Group(engine, _begun(batch, 0, params).to(engine.device), drawing)
    count = 0
    while not group.done:
        with torch.inference_mode(), products(engine.stage.device, engine.stage.dtype):
            group.compute()
            group.settle()
            tokens = group.drawn(0).tolist()
        yield from tokens[count:]
        count = len(tokens)


def _begun(batch: SampleBatch, iteration: int, params: SamplingParams) -> SampleBatch:
    """The prompts of a batch, with the keys that say how far responses are: by default, nothing is drawn yet."""
    n = len(batch)
    new = {
        BEFORE: Packed(torch.zeros(n, dtype=torch.int64), (1,) * n),
        BEGUN: Packed(torch.full((n,), iteration, dtype=torch.int64), (1,) * n),
        MOST: Packed(torch.full((n,), params.max_new_tokens, dtype=torch.int64), (1,) * n),
    }
    states = {key: batch.data.get(key, packed) for key, packed in new.items()}
    return SampleBatch(batch.ids, {"input_ids": batch["prompt_ids"], **states})


def _dealt(prompts: Packed, groups: int) -> list[list[int]]:
    """The places of the sequences of each group: those with the same prompt together, unless groups stayed empty."""
    together = same_prompts(prompts)
    if len(together) < groups:
        together = [[place] for place in range(len(prompts.lengths))]
    loads = [sum(prompts.lengths[place] for place in places) for places in together]
    return [[place for number in part for place in together[number]] for part in balance(loads, groups)]


def _decode(groups: Sequence[Group]) -> None:
    """The decode loop, until all groups are done, or at the end of a segment."""
    active = [group for group in groups if not group.done]
    while active:
        for group in active:
            if group.computed:
                group.settle()
            if not group.done:
                group.compute(0.0 if any(each.runs for each in active) else ANSWER_S)
        reach(Point.GENERATION)
        leave_if_ended()
        active = [group for group in active if not group.done]


def _assemble(
    batch: SampleBatch, groups: Sequence[Group], dtype_of_rows: torch.dtype, record_kept: bool
) -> SampleBatch:
    """The samples of all groups in the batch's order, on the batch's device."""
    samples = {sample_id: data for group in groups for sample_id, data in group.samples().items()}
    dtypes = {
        "input_ids": torch.int64,
        "response_mask": torch.bool,
        "old_logprobs": dtype_of_rows,
        "truncated": torch.bool,
    }
    if record_kept:
        dtypes |= dict.fromkeys(("kept_counts", "kept_tokens"), torch.int32)
    data = {}
    for key, dtype in dtypes.items():
        parts = [samples[sample_id][key] for sample_id in batch.ids]
        values = torch.cat([torch.empty(0, dtype=dtype), *parts])
        data[key] = Packed(values.to(batch["prompt_ids"].values.device), tuple(map(len, parts)))
    return SampleBatch(batch.ids, data)
