"""The generate call of every algorithm that samples from its policy."""

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf_tasks.algorithms.shared.configs import PolicyConfig
from rlhf_tasks.algorithms.shared.context import CallContext, CallOutput
from rlhf_tasks.algorithms.shared.graphs import DRAWN_BY
from rlhf_tasks.algorithms.shared.turns import draw
from rlhf_tasks.config.base import Samples
from rlhf_tasks.config.responses import SamplingConfig
from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from rlhf_tasks.parallel.generate.sampling import SamplingParams, StopStrings
from rlhf_tasks.parallel.train.engine import Engine

if TYPE_CHECKING:
    from rlhf_tasks.data.tokenizer import Tokenizer


def actor_generate(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """Sample responses to `prompt_ids`: `input_ids`, `response_mask`, `old_logprobs` and `truncated`; where the
    configuration `records_kept`, also `kept_counts` and `kept_tokens`; where it draws ahead, also `drawn_by`; where
    an environment answers, also `environment_rewards` (see `draw`).

    A response depends only on (seed, iteration, sample id, weights, prompt), not on the layout and micro-batches.
    Metrics, of all parts of the call: completions/mean_length in tokens, completions/clipped_ratio (fraction of
    truncated responses), throughput/tokens_per_s (response tokens of all dp ranks per second).
    """
    config = context.config
    assert isinstance(config, Samples), f"{config.type} runs do not generate"
    output = respond(engine, batch, context, config.sampling, config.records_kept)
    if output.batch is None or not isinstance(config, PolicyConfig) or not config.staleness:
        return output
    mask = output.batch["response_mask"]
    version = torch.where(mask.values, engine.version, -1)
    drawn = {**output.batch.data, DRAWN_BY: Packed(version, mask.lengths)}
    return CallOutput(SampleBatch(output.batch.ids, drawn), output.metrics)


def respond(
    engine: Engine, batch: SampleBatch, context: CallContext, settings: SamplingConfig, record_kept: bool
) -> CallOutput:
    """As `actor_generate`, with these settings of sampling.

    record_kept  whether to record which tokens top-k and top-p kept
    """
    sampling = sampling_params(settings, context.tokenizer)
    started = time.perf_counter()
    answered = draw(engine, batch, context, sampling, record_kept)
    elapsed_s = time.perf_counter() - started
    mine = torch.zeros(5, dtype=torch.float64)
    if answered is not None:
        mine[0] = len(answered)
        mine[1] = answered["response_mask"].values.sum()
        mine[2] = answered["truncated"].values.sum()
        mine[3] = elapsed_s
        mine[4] = 1
    return CallOutput(answered, generation_metrics(context.all_parts(engine.sum_over_dp(mine))))


def generation_metrics(parts: Sequence[Tensor] | None) -> dict[str, float]:
    """The metrics of generation, from sums over the dp ranks of each part: [5] float64 responses, their tokens, those
    truncated, seconds, dp ranks. None where further parts follow: there are none yet."""
    if parts is None:
        return {}
    figures = torch.stack(list(parts))
    responses, tokens, clipped = figures.sum(0).tolist()[:3]
    seconds = (figures[:, 3] / figures[:, 4].clamp(min=1)).sum().item()
    return {
        "completions/mean_length": tokens / responses,
        "completions/clipped_ratio": clipped / responses,
        "throughput/tokens_per_s": tokens / seconds,
    }


def sampling_params(settings: SamplingConfig, tokenizer: "Tokenizer") -> SamplingParams:
    """The engine's sampling parameters from a configuration's."""
    return SamplingParams(
        max_new_tokens=settings.max_completion_length,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_new_tokens=settings.min_new_tokens,
        stop_ids=tuple(dict.fromkeys((*tokenizer.stop_ids, *settings.stop_token_ids))),
        stop_strings=_stop_strings(tokenizer, settings.stop_strings) if settings.stop_strings else None,
    )


@lru_cache(maxsize=2)  # a run's and its evaluation's: a table takes a second for a vocabulary of 150,000
def _stop_strings(tokenizer: "Tokenizer", strings: tuple[str, ...]) -> StopStrings:
    return StopStrings(strings, tokenizer.texts())
