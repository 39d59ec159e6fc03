"""ReMax's calls (arXiv:2310.10505)."""

from functools import partial

from prefect_rlhf.rlhf_tasks.algorithms.remax import ReMaxConfig
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext, CallOutput, without_skipped
from prefect_rlhf.rlhf_tasks.algorithms.shared.generation import actor_generate, respond
from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import STAYS
from prefect_rlhf.rlhf_tasks.algorithms.shared.judging import judge_generate
from prefect_rlhf.rlhf_tasks.algorithms.shared.policy import (
    Objective,
    actor_inference,
    clipped_loss,
    learn,
    per_token,
    ref_inference,
    reference_kl,
    token_ratio,
)
from prefect_rlhf.rlhf_tasks.algorithms.shared.returns import (
    at_last_tokens,
    discounted_returns,
    shaped_rewards,
    token_rewards,
)
from prefect_rlhf.rlhf_tasks.algorithms.shared.scores import reward_inference, score_and_write
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine

__all__ = [
    "actor_generate",
    "actor_inference",
    "actor_train",
    "greedy_generate",
    "greedy_judge_generate",
    "greedy_reward_inference",
    "judge_generate",
    "ref_inference",
    "reward_inference",
]


def greedy_generate(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """The likeliest response to each prompt. Metrics: those of `actor_generate`, as greedy/..."""
    greedy = _remax(context).sampling.model_copy(update={"temperature": 0.0, "top_k": 0, "top_p": 1.0})
    return _as_greedy(respond(engine, batch, context, greedy, record_kept=False))


def greedy_judge_generate(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """The judge's replies about the greedy responses. Metrics: those of `judge_generate`, as greedy/..."""
    return _as_greedy(judge_generate(engine, batch, context))


def greedy_reward_inference(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """The scores of the greedy responses. Metrics: those of `reward_inference`, as greedy/..."""
    return _as_greedy(score_and_write(engine, batch, context, 0, "greedy-"))


def actor_train(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """Optimizer steps on each token, weighted by the rewards that follow less the score of the greedy response.

    The rewards are the score, or those of tokens and steps, and -beta times the KL divergence (k1) of each token.
    Metrics: see `learn`.
    """
    config, batch = _remax(context), without_skipped(without_skipped(batch), f"greedy_{STAYS}")
    mask, lengths = batch["response_mask"].values, batch["input_ids"].lengths
    baseline = at_last_tokens(batch["greedy_scores"].values.double(), mask, lengths)
    advances = token_rewards(batch).double() - baseline
    kl = reference_kl(batch, "k1").double() if config.beta > 0 else mask.double() * 0
    rewards = shaped_rewards(kl, advances, mask, config.beta)
    advantages = discounted_returns(rewards, mask, lengths, gamma=1.0)
    objective = Objective(token_ratio, partial(clipped_loss, low=config.epsilon, high=config.high), per_token)
    return learn(engine, batch, context, objective, advantages, "k1", baseline="greedy")


def _as_greedy(output: CallOutput) -> CallOutput:
    return CallOutput(output.batch, {f"greedy/{name}": value for name, value in output.metrics.items()})


def _remax(context: CallContext) -> ReMaxConfig:
    assert isinstance(context.config, ReMaxConfig), f"{context.config.type} runs have no such call"
    return context.config
