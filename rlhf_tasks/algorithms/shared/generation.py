"""The generate call that PPO and rollouts share."""

import time

import torch

from rlhf_tasks.algorithms.configurations import PPOConfig, RolloutConfig
from rlhf_tasks.algorithms.shared.context import CallContext, CallOutput
from rlhf_tasks.parallel.batch.samples import SampleBatch
from rlhf_tasks.parallel.generate.generation import generate as draw
from rlhf_tasks.parallel.generate.sampling import SamplingParams
from rlhf_tasks.parallel.train.engine import Engine


def generate(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """Answer `prompt_ids`: gives `input_ids`, `response_mask`, `old_logprobs` and `truncated`; for a PPO that
    samples from a part of the distribution also `kept_counts` and `kept_tokens`.

    A response is a function of (seed, sample id, weights, prompt) alone, whatever the layout.
    Metrics: completions/mean_length in tokens, completions/clipped_ratio (responses that ended by length),
    throughput/tokens_per_s (response tokens of all ranks).
    """
    config = context.config
    assert isinstance(config, PPOConfig | RolloutConfig), f"{config.type} runs do not generate"
    sampling = SamplingParams(
        max_new_tokens=config.sampling.max_completion_length,
        temperature=config.sampling.temperature,
        top_k=config.sampling.top_k,
        top_p=config.sampling.top_p,
        stop_ids=context.tokenizer.stop_ids,
    )
    started = time.perf_counter()
    record_kept = isinstance(config, PPOConfig) and config.records_kept
    answered = draw(engine, batch, sampling, config.seed, context.iteration, record_kept=record_kept)
    elapsed_s = time.perf_counter() - started
    mine = torch.zeros(4, dtype=torch.float64)
    if answered is not None:
        mine[0] = answered["response_mask"].values.sum()
        mine[1] = answered["truncated"].values.sum()
        mine[2] = elapsed_s
        mine[3] = 1
    tokens, clipped, seconds, heads = engine.sum_over_dp(mine).tolist()
    metrics = {
        "completions/mean_length": tokens / context.n_seqs,
        "completions/clipped_ratio": clipped / context.n_seqs,
        "throughput/tokens_per_s": tokens * heads / seconds,
    }
    return CallOutput(answered, metrics)
