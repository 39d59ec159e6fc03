"""Generation in segments: what has not ended when a batch is full continues in the next iteration
(docs/adr/0020-segments.md).

There are places for the groups of two batches. A place is free, or has the samples of a group, some of which may have
ended. Free places get the next groups in the order of the data, counted over all dp ranks. Then all samples that have
not ended are drawn by `segment_tokens` tokens, again and again, until a batch of whole groups has ended. The first of
these in the order of the data are delivered: they are the iteration's samples. So its batch is always full. In the
last iteration all is drawn to its end.

Where an environment answers, a segment is a turn of each sample, and its answer. The environment of an episode that
continues lives on; one that is gone, as after a kill or an evaluation, is given all turns again.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.algorithms.shared.configs import PolicyConfig
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext, CallFunction, CallOutput
from prefect_rlhf.rlhf_tasks.algorithms.shared.generation import (
    Dialogues,
    response_tokens,
    sampling_params,
)
from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import (
    ANSWERED,
    COLUMNS,
    DRAWN_BY,
    ENVIRONMENT_FAULT,
    ENVIRONMENT_REWARDS,
    KEPT,
    NUMBER,
    TOOL_CALLS,
)
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.generate.generation import Segments
from prefect_rlhf.rlhf_tasks.parallel.generate.generator import Order
from prefect_rlhf.rlhf_tasks.parallel.generate.places import BEFORE, BEGUN, MOST
from prefect_rlhf.rlhf_tasks.parallel.generate.turns import Turns
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from prefect_rlhf.rlhf_tasks.spec import ENDED, GROUPS_BEGUN, ModelFunctionCall
from prefect_rlhf.rlhf_tasks.user_code.tools.episode import OUTCOMES

FREE = -1
"""The number of the sample in a free place."""

_EMPTY: Mapping[str, torch.dtype] = {
    "input_ids": torch.int64,
    "response_mask": torch.bool,
    "old_logprobs": torch.float32,
    DRAWN_BY: torch.int64,
    "truncated": torch.bool,
    COLUMNS: torch.uint8,
    ENVIRONMENT_REWARDS: torch.float64,
    ENVIRONMENT_FAULT: torch.uint8,
    TOOL_CALLS: torch.int64,
    ANSWERED: torch.int64,
    **dict.fromkeys(KEPT, torch.int32),
}

_OF_EPISODES = (ENVIRONMENT_REWARDS, ENVIRONMENT_FAULT, TOOL_CALLS, ANSWERED)

Sample = dict[str, Tensor]
"""A sample by its keys, on the CPU: those that generation makes, ENDED and GROUPS_BEGUN."""


def nothing_left(call: ModelFunctionCall, places: Iterable[int], first_sample: int) -> SampleBatch:
    """The batch of the call if no iteration before has left samples: free places.

    places        numbers of the places of a dp rank's samples
    first_sample  global id of the first sample of the iteration: all before it count as begun
    """
    groups = torch.tensor([first_sample // call.group_size])
    return _batch({place: _free(call, groups) for place in places})


def functions_of(
    functions: Mapping[str, CallFunction], calls: Iterable[ModelFunctionCall]
) -> dict[str, CallFunction]:
    """The functions of a graph's calls. With segments, generation is `draw_segments`."""
    known = {call.name: call for call in calls}
    result = dict(functions)
    for name, function in functions.items():
        if known[name].segment_tokens:
            result[name] = draw_segments(known[name])
        elif NUMBER in known[name].inputs:
            result[name] = under_their_numbers(function)
    return result


def under_their_numbers(function: CallFunction) -> CallFunction:
    """Wraps the function of a call that reads NUMBER: it gets the samples under these ids, which rewards, files and
    errors name."""

    def on_numbered(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
        ids = tuple(batch[NUMBER].values.tolist())
        output = function(engine, SampleBatch(ids, batch.data), context)
        if output.batch is None:
            return output
        return CallOutput(SampleBatch(batch.ids, output.batch.reorder(ids).data), output.metrics)

    return on_numbered


def draw_segments(call: ModelFunctionCall) -> CallFunction:
    """The function of `actor_generate` in segments.

    Its batch is what the iteration before has left in the places of this dp rank (`call.left`). It gives the keys
    of `actor_generate`, with DRAWN_BY, NUMBER and COLUMNS, for samples of the iteration: those that ended on this dp
    rank, which may differ from the samples dealt to it.
    A response depends only on (seed, sample, weights that drew each of its tokens, prompt). If the weights do not
    change, its tokens equal those of a response that is drawn at once.
    Metrics: completions/mean_length and completions/clipped_ratio of the samples that are delivered;
    throughput/tokens_per_s of the tokens that are drawn; segments/unfinished (samples that were begun and are not
    delivered) and segments/waiting (those of them whose group has ended).
    """

    def function(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
        config = context.config
        assert isinstance(config, PolicyConfig), f"{config.type} runs do not sample in segments"
        places = dict(zip(batch.ids, _samples(batch), strict=True))
        _begin(engine, places, context, call, config.total_iterations)
        # The longest first: the cache is read in runs of sequences of similar lengths.
        running = sorted(
            (one for one in places.values() if one[NUMBER] != FREE and not one[ENDED]),
            key=lambda sample: (-len(sample["input_ids"]), int(sample[NUMBER])),
        )
        is_last = context.iteration == config.total_iterations - 1

        def enough(ended: Sequence[int]) -> bool:
            return len(_ready(engine, places, call, ended)) >= call.n_groups

        started = time.perf_counter()
        order = Order(
            sampling_params(config.sampling, context.tokenizer),
            config.seed,
            context.iteration,
            stop_strings=config.sampling.stop_strings,
            record_kept=config.records_kept,
            micro_batches=context.micro_batches,
            segments=None if is_last else Segments(call.segment_tokens or 1, enough),
        )
        context.generator.take(engine)
        batch = _to_draw(running, config)
        dialogues = None
        if config.environment is not None:
            if engine.is_head:
                dialogues = Dialogues(batch, context, config, config.sampling.max_completion_length)
            most = config.environment.max_turn_tokens or call.segment_tokens or 1
            order = order._replace(turns=Turns(most, dialogues, together=True))
        drawn = context.generator.draw(batch, order)
        if drawn is not None and dialogues is not None:
            drawn = dialogues.completed(drawn)
        elapsed_s = time.perf_counter() - started
        if drawn is not None:
            for sample, new in zip(running, _samples(drawn), strict=True):
                _extend(sample, new, context.generator.version, config.sampling.max_completion_length)
        ready = _ready(engine, places, call)
        due = {group: number for number, group in enumerate(ready[: call.n_groups])}
        if drawn is None:
            return CallOutput(metrics=_metrics(engine, None))
        whole = frozenset(ready)
        size, first = call.group_size, context.first_sample
        delivered = {
            first + due[int(sample[NUMBER]) // size] * size + int(sample[NUMBER]) % size: place
            for place, sample in places.items()
            if int(sample[NUMBER]) // size in due
        }
        ends = {number: places[place] for number, place in sorted(delivered.items())}
        figures = _Figures(
            delivered=len(ends),
            tokens=sum(int(sample["response_mask"].sum()) for sample in ends.values()),
            truncated=sum(int(sample["truncated"]) for sample in ends.values()),
            unfinished=sum(int(sample[NUMBER]) != FREE for sample in places.values()) - len(ends),
            waiting=sum(int(sample[NUMBER]) // size in whole for sample in places.values()) - len(ends),
            drawn=int(drawn["response_mask"].values.sum()),
            seconds=elapsed_s,
            heads=1,
        )
        for place in delivered.values():
            places[place] = _free(call, places[place][GROUPS_BEGUN])
        metrics = _metrics(engine, figures)
        return CallOutput(_batch(ends).to(engine.device) if ends else None, metrics, _batch(places))

    return function


def _begin(
    engine: Engine,
    places: Mapping[int, Sample],
    context: CallContext,
    call: ModelFunctionCall,
    iterations: int,
) -> None:
    """Put the next groups into the free places of all dp ranks, in the order of the places, while the run has some.
    Collective."""
    size = call.group_size
    # Not of the whole run's iterations: before an accepted change they may have had another batch size.
    in_all = context.first_sample // size + (iterations - context.iteration) * call.n_groups
    free = torch.zeros(call.n_places // size, dtype=torch.float64)
    for place, sample in places.items():
        if sample[NUMBER] == FREE:
            free[place // size] = 1
    everywhere = engine.sum_over_dp(free).cpu().long()
    begun = next(iter(places.values()))[GROUPS_BEGUN]
    group_of = begun + everywhere.cumsum(0) - 1
    numbers = {
        place: int(group_of[place // size]) * size + place % size
        for place, sample in places.items()
        if sample[NUMBER] == FREE and group_of[place // size] < in_all
    }
    for sample in places.values():
        sample[GROUPS_BEGUN] = (begun + everywhere.sum()).clamp(max=in_all)
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
        if ENVIRONMENT_REWARDS in sample:
            sample[ENVIRONMENT_REWARDS] = torch.zeros(1, dtype=torch.float64)
        if TOOL_CALLS in sample:
            sample[TOOL_CALLS] = torch.zeros(len(OUTCOMES), dtype=torch.int64)


def _ready(
    engine: Engine, places: Mapping[int, Sample], call: ModelFunctionCall, ended: Iterable[int] = ()
) -> list[int]:
    """The numbers of the groups in all dp ranks' places of which all samples have ended, ascending. Collective.

    ended  numbers of samples that have ended besides those that say so themselves
    """
    size, now = call.group_size, set(ended)
    numbers = torch.zeros(call.n_places // size, dtype=torch.float64)
    for place, sample in places.items():
        if sample[NUMBER] != FREE:
            numbers[place // size] = int(sample[NUMBER]) // size + 1
    for place, sample in places.items():
        if not sample[ENDED] and int(sample[NUMBER]) not in now:
            numbers[place // size] = 0
    return sorted(int(number) - 1 for number in engine.sum_over_dp(numbers).tolist() if number)


def _to_draw(running: Sequence[Sample], config: PolicyConfig) -> SampleBatch:
    """Samples under their numbers, as `generate` takes them; where an environment answers, as `Dialogues` does, too.
    Random numbers are those of the iteration that would have begun them if all were drawn at once."""
    numbers, one = [int(sample[NUMBER]) for sample in running], (1,) * len(running)
    before = torch.tensor([response_tokens(sample["response_mask"]) for sample in running], dtype=torch.int64)
    begun = torch.tensor([n // config.batch_size for n in numbers], dtype=torch.int64)

    def packed(key: str, dtype: torch.dtype) -> Packed:
        parts = [sample[key] for sample in running]
        return Packed(torch.cat([torch.zeros(0, dtype=dtype), *parts]), tuple(map(len, parts)))

    data = {"prompt_ids": packed("input_ids", torch.int64), BEGUN: Packed(begun, one)}
    if config.environment is None:
        return SampleBatch(tuple(numbers), {**data, BEFORE: Packed(before, one)})
    # A turn begins, so nothing of it was drawn before.
    most = Packed(config.sampling.max_completion_length - before, one)
    keys = ("response_mask", ENVIRONMENT_REWARDS, ANSWERED, *([TOOL_CALLS] if config.tools else []))
    played = {key: packed(key, _EMPTY[key]) for key in keys}
    return SampleBatch(
        tuple(numbers), {**data, MOST: most, "columns": packed(COLUMNS, torch.uint8), **played}
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
    drawn_by = torch.where(drawn[before:], version, -1)
    sample[DRAWN_BY] = torch.cat([sample[DRAWN_BY], drawn_by])
    if ENDED in new:
        sample |= {key: new[key] for key in (*_OF_EPISODES, ENDED) if key in new}
        sample["truncated"] = new["truncated"] & new[ENDED]
    else:
        sample["truncated"] = new["truncated"] & (sample["response_mask"].sum() == most)
        sample[ENDED] = ~new["truncated"] | sample["truncated"]
    if "kept_counts" in sample:
        sample["kept_counts"] = torch.cat([sample["kept_counts"], new["kept_counts"][before:]])
        sample["kept_tokens"] = torch.cat([sample["kept_tokens"], new["kept_tokens"]])


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


class _Figures(NamedTuple):
    """Figures of one dp rank, or sums of all.

    delivered, tokens, truncated  samples that are delivered now, their response tokens, those that are truncated
    unfinished  samples that were begun and are not delivered
    waiting     those of them whose groups have ended
    drawn       tokens that were drawn, in so many `seconds`
    heads       dp ranks
    """

    delivered: float = 0
    tokens: float = 0
    truncated: float = 0
    unfinished: float = 0
    waiting: float = 0
    drawn: float = 0
    seconds: float = 0
    heads: float = 0


def _metrics(engine: Engine, mine: _Figures | None) -> dict[str, float]:
    """The metrics of a call. Collective over the mesh. mine: on a head"""
    of_all = engine.sum_over_dp(torch.tensor(mine or _Figures(), dtype=torch.float64))
    figures = _Figures(*of_all.tolist())
    return {
        "completions/mean_length": figures.tokens / figures.delivered,
        "completions/clipped_ratio": figures.truncated / figures.delivered,
        "throughput/tokens_per_s": figures.drawn * figures.heads / figures.seconds,
        "segments/unfinished": figures.unfinished,
        "segments/waiting": figures.waiting,
    }
