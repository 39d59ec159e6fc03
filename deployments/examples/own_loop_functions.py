"""The calls of own_loop.py that are its own; those that it takes as they are have the same names."""

from functools import partial

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.algorithms.ppo import PPOConfig
from prefect_rlhf.rlhf_tasks.algorithms.ppo.functions import critic_inference, shifted, value_loss
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext, CallOutput
from prefect_rlhf.rlhf_tasks.algorithms.shared.generation import actor_generate
from prefect_rlhf.rlhf_tasks.algorithms.shared.policy import (
    Counts,
    Objective,
    actor_inference,
    clipped_loss,
    per_token,
    policy_steps,
    ref_inference,
    token_ratio,
)
from prefect_rlhf.rlhf_tasks.algorithms.shared.schedule import Steps, counts_per_block, optimizer_steps
from prefect_rlhf.rlhf_tasks.algorithms.shared.scores import reward_inference
from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine, LossTerms

__all__ = [
    "actor_generate",
    "actor_inference",
    "actor_train",
    "advantages",
    "critic_inference",
    "critic_train",
    "ref_inference",
    "reward_inference",
]


def twos(completions: list[str], **_: object) -> list[float]:
    """A reward: the share of twos in each answer."""
    return [answer.count("2") / max(len(answer), 1) for answer in completions]


def advantages(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """KL-shaped rewards, and generalised advantages (arXiv:1506.02438, eq. 16), whitened, on rectangles [n, longest].

    Metrics: kl (mean over the sequences of KL(policy || reference), in nats).
    """
    config = _config(context)
    if len(batch) < context.n_seqs:
        raise ValueError(
            f"advantages has {len(batch)} of {context.n_seqs} samples. Give its pool one device."
        )
    mask, values = batch.pad("response_mask"), batch.pad("values")
    kl = torch.where(mask, batch.pad("old_logprobs") - batch.pad("ref_logprobs"), 0.0)
    rewards, places = -config.kl_coef * kl, torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, places, -1).amax(1)
    answered = (last >= 0).nonzero().squeeze(1)
    rewards[answered, last[answered]] += batch["scores"].values[answered].to(rewards.dtype)
    gained = torch.zeros_like(rewards)
    next_value = next_gain = torch.zeros_like(rewards[:, 0])
    for place in reversed(range(mask.shape[1])):
        delta = rewards[:, place] + config.gamma * next_value - values[:, place]
        gain = delta + config.gamma * config.lam * next_gain
        gained[:, place] = next_gain = torch.where(mask[:, place], gain, 0.0)
        next_value = torch.where(mask[:, place], values[:, place], 0.0)
    made = batch.unpad("input_ids", advantages=_whitened(gained, mask), returns=(gained + values) * mask)
    return CallOutput(made.select("advantages", "returns"), {"kl": kl.sum(1).double().mean().item()})


def _config(context: CallContext) -> PPOConfig:
    assert isinstance(context.config, PPOConfig), f"{context.config.type} runs have no such call"
    return context.config


def _whitened(gained: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and standard deviation 1 over the response tokens."""
    of_tokens = gained[mask].double()
    shifted_by_mean = gained - of_tokens.mean().to(gained.dtype)
    return torch.where(mask, shifted_by_mean / (of_tokens.std() + 1e-8).to(gained.dtype), 0.0)


def actor_train(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """Optimizer steps on the clipped policy loss: the mean over the response tokens of a mini-batch."""
    bounds = _config(context).cliprange
    objective = Objective(token_ratio, partial(clipped_loss, low=bounds, high=bounds), per_token)
    tokens, learned = _tokens(engine, batch, context), batch["response_mask"].values
    counts = Counts([], tokens, tokens)
    metrics = policy_steps(engine, batch, context, objective, batch["advantages"].values, learned, counts)
    return CallOutput(metrics=metrics)


def critic_train(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """Optimizer steps on the clipped value loss: the mean over the response tokens of a mini-batch."""
    config = _config(context)

    def loss(stage_values: Tensor, micro: MicroBatch) -> LossTerms:
        data = micro.data
        values = shifted(stage_values, micro.position_ids)
        terms, _ = value_loss(values, data["values"], data["returns"], config.cliprange_value)
        return LossTerms(torch.where(data["response_mask"], terms, 0.0).sum(), {})

    steps = Steps(engine, loss, _tokens(engine, batch, context), context.micro_batches)
    for step in optimizer_steps(batch, context, config.critic_optimizer):
        steps.take(step)
    return CallOutput(metrics={"loss/value": steps.mean("loss"), **steps.end("critic")})


def _tokens(engine: Engine, batch: SampleBatch, context: CallContext) -> list[float]:
    """Response tokens of each mini-batch, on all replicas."""
    return engine.sum_over_dp(counts_per_block(batch, context, "response_mask").to(engine.device)).tolist()
