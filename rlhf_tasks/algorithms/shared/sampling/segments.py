"""Generation in segments: what has not ended within `segment_tokens` goes on in the next iteration
(docs/adr/0020-segments.md).

A batch has places: one for each group of samples of a prompt. A place is free, or has the samples of a group, some of
which may have ended. When all have, the group is delivered: the place's samples of this iteration are these, and the
place is free. Samples of the other places have 0 rows in this iteration. Free places get the next groups in the order
of the data, counted over all dp ranks. In the last iteration all is drawn to its end.
"""

import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_tasks.algorithms.shared.context import CallContext, CallFunction, CallOutput
from rlhf_tasks.algorithms.shared.graphs.drawn_ahead import COLUMNS, DRAWN_BY, NUMBER
from rlhf_tasks.algorithms.shared.graphs.rollout_calls import KEPT
from rlhf_tasks.algorithms.shared.policy_config import PolicyConfig
from rlhf_tasks.algorithms.shared.sampling.generated import generated, with_others
from rlhf_tasks.algorithms.shared.sampling.generation import sampling_params
from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from rlhf_tasks.parallel.generate.generation import generate as draw
from rlhf_tasks.parallel.generate.slots import BEFORE, BEGUN
from rlhf_tasks.parallel.train.engine import Engine
from rlhf_tasks.spec import ModelFunctionCall

FREE = -1
"""The number of the sample in a free place."""

GROUPS_BEGUN = "groups_begun"
"""The key of the number of groups that were begun so far, on all dp ranks together."""

ENDED = "ended"
"""The key that says whether a sample has ended; it may wait for the others of its group."""

_EMPTY: Mapping[str, torch.dtype] = {
    "input_ids": torch.int64,
    "response_mask": torch.bool,
    "old_logprobs": torch.float32,
    DRAWN_BY: torch.int64,
    "truncated": torch.bool,
    COLUMNS: torch.uint8,
    **dict.fromkeys(KEPT, torch.int32),
}

Sample = dict[str, Tensor]
"""A sample by its keys, on the CPU: those that generation makes, ENDED and GROUPS_BEGUN."""


def left_keys(call: ModelFunctionCall) -> dict[str, str]:
    """Key of what a call leaves for the next iteration -> its name in the samples' store."""
    return {key: f"left_{key}" for key in (*call.outputs, ENDED, GROUPS_BEGUN)}


def nothing_left(call: ModelFunctionCall, ids: Iterable[int], first_sample: int) -> SampleBatch:
    """What the call finds where no iteration before has left anything: free places.

    first_sample  global id of the first sample of the iteration: all before it count as begun
    """
    groups = torch.tensor([first_sample // call.group_size])
    return _batch({sample: _free(call, groups) for sample in ids})


def functions_of(
    functions: Mapping[str, CallFunction], calls: Iterable[ModelFunctionCall]
) -> dict[str, CallFunction]:
    """The functions of a graph's calls. With segments, generation is `draw_segment`, and the calls behind it get only
    what has ended."""
    known = {call.name: call for call in calls}
    segmented = [call for call in known.values() if call.segment_tokens]
    if not segmented:
        return dict(functions)
    return {
        name: draw_segment(known[name]) if known[name] in segmented else on_delivered(known[name], function)
        for name, function in functions.items()
    }


def on_delivered(call: ModelFunctionCall, function: CallFunction) -> CallFunction:
    """The function of a call behind generation: nothing that it does knows of the samples that have not ended.

    A call that reads NUMBER is given the samples under these ids, as rewards, files and errors name them. Where no
    sample of an iteration has ended, a train_step does nothing, and no call has metrics.
    """

    def on_those_that_ended(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
        ended = generated(batch, call.token_key)
        n = engine.sum_over_dp(torch.tensor([len(ended)], dtype=torch.float64)).item()
        if not n and call.kind == "train_step":
            return CallOutput()
        ids = tuple(ended[NUMBER].values.tolist()) if NUMBER in call.inputs else ended.ids
        output = function(engine, SampleBatch(ids, ended.data), context)
        made = output.batch
        if made is not None:
            made = with_others(SampleBatch(ended.ids, made.select(ids).data), batch.ids)
        return CallOutput(made, output.metrics if n else {})

    return on_those_that_ended


def draw_segment(call: ModelFunctionCall) -> CallFunction:
    """The function of `actor_generate` in segments.

    Its batch is what the iteration before has left in the places, see `left_keys`. It gives the keys of
    `actor_generate` for the samples that end, with DRAWN_BY, NUMBER and COLUMNS, and no rows for the others.
    A response depends only on (seed, sample, weights that drew each of its tokens, prompt). Where the weights do not
    change, its tokens are those that it has when it is drawn at once.
    Metrics: completions/mean_length and completions/clipped_ratio of the samples that end, where some do;
    throughput/tokens_per_s of the tokens that are drawn; segments/delivered and segments/unfinished (samples).
    """

    def function(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
        config = context.config
        assert isinstance(config, PolicyConfig), f"{config.type} runs do not sample in segments"
        places = dict(zip(batch.ids, _samples(batch), strict=True))
        _begin(engine, places, context, call)
        running = {place: sample for place, sample in places.items() if not sample[ENDED]}
        is_last = context.iteration == config.total_iterations - 1
        started = time.perf_counter()
        drawn = draw(
            engine,
            _to_draw(running, config.batch_size),
            sampling_params(config.sampling, context.tokenizer),
            config.seed,
            context.iteration,
            record_kept=config.records_kept,
            micro_batches=context.micro_batches,
            segment_tokens=None if is_last else call.segment_tokens,
        )
        elapsed_s = time.perf_counter() - started
        if drawn is None:
            return CallOutput(metrics=_metrics(engine, None))
        for sample, new in zip(running.values(), _samples(drawn), strict=True):
            _extend(sample, new, engine.version, config.sampling.max_completion_length)
        ended = _delivered(places, call.group_size)
        free = _free(call, next(iter(places.values()))[GROUPS_BEGUN])
        ends = {
            place: sample if place in ended else {key: value[:0] for key, value in sample.items()}
            for place, sample in places.items()
        }
        left = {place: free if place in ended else sample for place, sample in places.items()}
        told = _Told(
            delivered=len(ended),
            tokens=sum(int(places[place]["response_mask"].sum()) for place in ended),
            truncated=sum(int(places[place]["truncated"]) for place in ended),
            unfinished=len(places) - len(ended),
            drawn=int(drawn["response_mask"].values.sum()),
            seconds=elapsed_s,
            heads=1,
        )
        metrics = _metrics(engine, told)
        return CallOutput(_batch(ends).to(engine.device), metrics, _batch(left).to(engine.device))

    return function


def _begin(
    engine: Engine, places: Mapping[int, Sample], context: CallContext, call: ModelFunctionCall
) -> None:
    """Put the next groups into the free places of all dp ranks, in the order of the places. Collective."""
    size, first = call.group_size, context.first_sample
    free = torch.zeros(context.n_seqs // size, dtype=torch.float64)
    for place, sample in places.items():
        if sample[NUMBER] == FREE:
            free[(place - first) // size] = 1
    everywhere = engine.sum_over_dp(free).cpu().long()
    begun = next(iter(places.values()))[GROUPS_BEGUN]
    group_of = begun + everywhere.cumsum(0) - 1
    numbers = {
        place: int(group_of[(place - first) // size]) * size + (place - first) % size
        for place, sample in places.items()
        if sample[NUMBER] == FREE
    }
    for sample in places.values():
        sample[GROUPS_BEGUN] = begun + everywhere.sum()
    if not numbers:
        return
    assert context.rows is not None, "the call reads rows"
    for place, row in zip(numbers, _samples(context.rows(tuple(numbers.values()))), strict=True):
        sample, n = places[place], len(row["prompt_ids"])
        sample[NUMBER], sample["truncated"] = torch.tensor([numbers[place]]), torch.tensor([False])
        sample[COLUMNS], sample["input_ids"] = row["columns"], row["prompt_ids"]
        sample["response_mask"] = torch.zeros(n, dtype=torch.bool)
        sample["old_logprobs"] = torch.zeros(n, dtype=sample["old_logprobs"].dtype)
        sample[DRAWN_BY] = torch.full((n,), -1)
        if "kept_counts" in sample:
            sample["kept_counts"] = torch.zeros(n, dtype=torch.int32)


def _to_draw(running: Mapping[int, Sample], batch_size: int) -> SampleBatch:
    """Samples under their numbers, as `generate` takes them. Random numbers are those of the iteration that would
    have begun them if all were drawn at once."""
    numbers = [int(sample[NUMBER]) for sample in running.values()]
    one = (1,) * len(numbers)
    return SampleBatch(
        tuple(numbers),
        {
            "prompt_ids": Packed.of([sample["input_ids"] for sample in running.values()]),
            BEFORE: Packed(
                torch.tensor([int(sample["response_mask"].sum()) for sample in running.values()]), one
            ),
            BEGUN: Packed(torch.tensor([number // batch_size for number in numbers]), one),
        },
    )


def _extend(sample: Sample, new: Sample, version: int, most: int) -> None:
    """Add what was drawn of a sample now.

    version  of the actor that drew
    most     tokens of the longest response
    """
    before, drawn = len(sample["input_ids"]), new["response_mask"]
    sample["input_ids"] = new["input_ids"]
    sample["response_mask"] = torch.cat([sample["response_mask"], drawn[before:]])
    sample["old_logprobs"] = torch.cat([sample["old_logprobs"], new["old_logprobs"][before:]])
    sample[DRAWN_BY] = torch.cat([sample[DRAWN_BY], torch.full((len(drawn) - before,), version)])
    sample["truncated"] = new["truncated"] & (sample["response_mask"].sum() == most)
    sample[ENDED] = ~new["truncated"] | sample["truncated"]
    if "kept_counts" in sample:
        sample["kept_counts"] = torch.cat([sample["kept_counts"], new["kept_counts"][before:]])
        sample["kept_tokens"] = torch.cat([sample["kept_tokens"], new["kept_tokens"]])


def _delivered(places: Mapping[int, Sample], size: int) -> set[int]:
    """The places of the groups of which all samples have ended. size: samples of a group"""
    running = {place // size for place, sample in places.items() if not sample[ENDED]}
    return {place for place in places if place // size not in running}


def _free(call: ModelFunctionCall, groups_begun: Tensor) -> Sample:
    """What a free place has."""
    empty = {key: torch.zeros(0, dtype=_EMPTY[key]) for key in call.outputs if key in _EMPTY}
    return {
        **empty,
        NUMBER: torch.tensor([FREE]),
        ENDED: torch.tensor([False]),
        GROUPS_BEGUN: groups_begun,
    }


def _samples(batch: SampleBatch) -> list[Sample]:
    parts = {key: packed.to(torch.device("cpu")).split() for key, packed in batch.data.items()}
    return [{key: of_key[place] for key, of_key in parts.items()} for place in range(len(batch))]


def _batch(samples: Mapping[int, Sample]) -> SampleBatch:
    keys = next(iter(samples.values()))
    return SampleBatch(
        tuple(samples), {key: Packed.of([sample[key] for sample in samples.values()]) for key in keys}
    )


class _Told(NamedTuple):
    """Figures of one dp rank, or sums of all.

    delivered, tokens, truncated  samples that end now, their response tokens, those of them that are truncated
    unfinished  samples that do not, or wait for others of their group
    drawn       tokens that were drawn, in so many `seconds`
    heads       dp ranks
    """

    delivered: float = 0
    tokens: float = 0
    truncated: float = 0
    unfinished: float = 0
    drawn: float = 0
    seconds: float = 0
    heads: float = 0


def _metrics(engine: Engine, own: _Told | None) -> dict[str, float]:
    """The metrics of a call. Collective over the mesh. own: on a head"""
    of_all = engine.sum_over_dp(torch.tensor(own or _Told(), dtype=torch.float64))
    told = _Told(*of_all.tolist())
    found: dict[str, float] = {}
    if told.delivered:
        found["completions/mean_length"] = told.tokens / told.delivered
        found["completions/clipped_ratio"] = told.truncated / told.delivered
    return {
        **found,
        "throughput/tokens_per_s": told.drawn * told.heads / told.seconds,
        "segments/delivered": told.delivered,
        "segments/unfinished": told.unfinished,
    }
