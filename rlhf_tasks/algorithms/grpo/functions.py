"""GRPO's calls (arXiv:2402.03300), with the options of Dr.GRPO, DAPO, GSPO and CISPO.

With dynamic sampling (DAPO, arXiv:2503.14476, section 3.2) an iteration samples in rounds, until enough groups have
scores that differ.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.algorithms.grpo import DIFFERING, GRPOConfig
from prefect_rlhf.rlhf_tasks.algorithms.shared import scores
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import (
    CallContext,
    CallOutput,
    generated,
    without_skipped,
)
from prefect_rlhf.rlhf_tasks.algorithms.shared.generation import actor_generate
from prefect_rlhf.rlhf_tasks.algorithms.shared.groups import (
    all_equal,
    group_stds,
    less_mean,
    on_tokens,
    per_group,
    response_lengths,
)
from prefect_rlhf.rlhf_tasks.algorithms.shared.judging import judge_generate
from prefect_rlhf.rlhf_tasks.algorithms.shared.policy import (
    Objective,
    actor_inference,
    cispo_loss,
    clipped_loss,
    geometric_ratio,
    learn,
    per_most_tokens,
    per_response,
    per_token,
    ref_inference,
    token_ratio,
)
from prefect_rlhf.rlhf_tasks.algorithms.shared.returns import moments
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine

__all__ = [
    "actor_generate",
    "actor_inference",
    "actor_train",
    "judge_generate",
    "ref_inference",
    "reward_inference",
]

STD_EPSILON = 1e-4
"""Added to the standard deviation that divides a score, as in TRL."""

RATIOS = {"token": token_ratio, "sequence": geometric_ratio}
WEIGHTINGS = {"grpo": per_response, "dapo": per_token, "dr_grpo": per_most_tokens, "cispo": per_token}


def actor_train(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """Optimizer steps on the loss of shared/policy.py. A token has its response's advantage (`relative_scores`).

    The surrogate is PPO's clipped one, or with loss_type cispo the bounded one; the KL term is beta * k3. loss_type
    gives the weight w of a token, and the denominator, which counts the mini-batch on all replicas:
        grpo         w = 1 / learned tokens of the response; number of responses
        dapo, cispo  w = 1; number of learned tokens
        dr_grpo      w = 1; number of responses * max_completion_length

    Metrics: see `learn`; with filter_groups also groups/kept (groups that stay in the batch) and groups/rounds
    (rounds of samples that were generated).
    """
    config, made = _grpo(context), generated(batch)
    batch = without_skipped(made)
    clipped = partial(clipped_loss, low=config.epsilon, high=config.high, dual_clip=config.delta)
    surrogate = partial(cispo_loss, high=config.high) if config.loss_type == "cispo" else clipped
    objective = Objective(
        RATIOS[config.importance_sampling_level], surrogate, WEIGHTINGS[config.loss_type], config.beta
    )
    scores = shaped_scores(batch, config)
    advantages = on_tokens(relative_scores(engine, scores, batch.ids, config), batch["input_ids"].lengths)
    if not config.filter_groups:
        return learn(engine, batch, context, objective, advantages)
    # Before the penalty of long responses: their length alone is not what a group is to be compared by.
    chosen = choose(engine, batch, made.ids, context, config)
    learned = learn(engine, batch, context, objective, advantages, ids=chosen.ids)
    told = {"groups/kept": float(chosen.groups), "groups/rounds": float(chosen.rounds)}
    return CallOutput(metrics={**learned.metrics, **told})


def _grpo(context: CallContext) -> GRPOConfig:
    assert isinstance(context.config, GRPOConfig), f"{context.config.type} runs have no such call"
    return context.config


def shaped_scores(batch: SampleBatch, config: GRPOConfig) -> Tensor:
    """The scores, less the penalty of long responses where there is one: [n] float64."""
    scores = batch["scores"].values.double()
    if config.overlong_buffer is None:
        return scores
    tokens = response_lengths(batch["response_mask"].values, batch["input_ids"].lengths)
    most = config.sampling.max_completion_length
    return scores + config.overlong_penalty * overlong_penalties(tokens, most, config.overlong_buffer)


def overlong_penalties(response_tokens: Tensor, most: int, buffer: float) -> Tensor:
    """The soft length penalty: 0, falling linearly to -1 for the longest response (arXiv:2503.14476, eq. 13).

    response_tokens  [n] int64
    most             tokens of the longest response
    buffer           share of `most`: the penalty grows over the last buffer * most tokens
    Returns [n] float64.
    """
    width = buffer * most
    return -((response_tokens.double() - (most - width)) / width).clamp(0, 1)


def relative_scores(engine: Engine, scores: Tensor, ids: Sequence[int], config: GRPOConfig) -> Tensor:
    """Each sample's score less its group's mean, divided by the standard deviation of its group or of the batch: [n]
    float64 (arXiv:2402.03300, section 4.1.2).

    scores [n] of the samples `ids`; some samples of a group may be missing
    Standard deviations are unbiased. A group of equal scores gets exactly 0. Collective over the mesh.
    """
    size = config.num_generations
    relative = per_group(less_mean, scores, ids, size)
    match config.scale_rewards:
        case "group":
            return relative / (per_group(group_stds, scores, ids, size) + STD_EPSILON)
        case "batch":
            everyone = torch.ones_like(scores, dtype=torch.bool)
            count = engine.sum_over_dp(everyone.sum()[None]).item()
            (of_batch,) = moments(engine, everyone, count, scores)
            return relative / (of_batch.std + STD_EPSILON)
        case "none":
            return relative


def reward_inference(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """As `scores.reward_inference`. Of a round also DIFFERING, by which the controller decides on the next one."""
    config, output = _grpo(context), scores.reward_inference(engine, batch, context)
    if config.max_rounds == 1:
        return output
    differing = torch.zeros(1, dtype=torch.float64)
    if output.batch is not None:
        differing[0] = len(groups_that_differ(without_skipped(output.batch), config.num_generations))
    return replace(output, of_part={DIFFERING: engine.sum_over_dp(differing.to(engine.device)).item()})


def groups_that_differ(batch: SampleBatch, size: int) -> set[int]:
    """The numbers of the groups (sample id // size) whose scores are not all equal."""
    unlike = ~per_group(all_equal, batch["scores"].values, batch.ids, size)
    return {sample // size for sample, differs in zip(batch.ids, unlike.tolist(), strict=True) if differs}


class Chosen(NamedTuple):
    """What an iteration learns from.

    ids     of the samples of the first groups that differ, at most as many as a batch has
    groups  number of these groups
    rounds  number of rounds that generated
    """

    ids: list[int]
    groups: int
    rounds: int


def choose(
    engine: Engine, batch: SampleBatch, made: Sequence[int], context: CallContext, config: GRPOConfig
) -> Chosen:
    """The groups whose scores are not all equal, in the order of the samples. Collective over the mesh.

    batch  this replica's generated samples, with `scores`, without those that have left the batch
    made   ids of all its generated samples
    """
    size, first = config.num_generations, context.first_sample
    marks = torch.zeros(2, context.n_seqs // size, dtype=torch.float64)
    for row, groups in enumerate((groups_that_differ(batch, size), {sample // size for sample in made})):
        marks[row, [group - first // size for group in groups]] = 1.0
    differing, generated_groups = engine.sum_over_dp(marks.to(engine.device)).bool().tolist()
    taken = [group for group, differs in enumerate(differing) if differs][: config.batch_size // size]
    ids = [first + group * size + number for group in taken for number in range(size)]
    a_round = config.batch_size // size
    return Chosen(
        ids,
        len(taken),
        max((group // a_round + 1 for group, was in enumerate(generated_groups) if was), default=1),
    )
