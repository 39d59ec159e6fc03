"""PPO's calls (arXiv:1707.06347; arXiv:2203.02155).

Each function runs on all ranks of its call's mesh. Their order: actor_generate; then reward_inference, ref_inference
and critic_inference; then actor_train and critic_train.
"""

from functools import partial

import torch
from torch import Tensor

from rlhf_tasks.algorithms.ppo import PPOConfig
from rlhf_tasks.algorithms.ppo.critic import ValueNorm, shifted, value_loss
from rlhf_tasks.algorithms.ppo.targets import learning_targets
from rlhf_tasks.algorithms.shared.context import CallContext, CallOutput
from rlhf_tasks.algorithms.shared.policy import (
    Counts,
    Objective,
    actor_inference,
    clipped_loss,
    per_token,
    policy_steps,
    ref_inference,
    token_ratio,
)
from rlhf_tasks.algorithms.shared.sampling.generation import actor_generate
from rlhf_tasks.algorithms.shared.sampling.staying import without_skipped
from rlhf_tasks.algorithms.shared.schedule import Steps, optimizer_steps
from rlhf_tasks.algorithms.shared.scores import reward_inference
from rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from rlhf_tasks.parallel.train.engine import Engine, LossTerms

__all__ = [
    "actor_generate",
    "actor_inference",
    "actor_train",
    "critic_inference",
    "critic_train",
    "ref_inference",
    "reward_inference",
]


def critic_inference(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """Compute `values`, in reward units: the value of the state before each response token.

    If truncated responses are bootstrapped, also `final_values`: the value after each sample's last token.
    """
    norm = ValueNorm.of(engine.state)

    def output(stage_values: Tensor, micro: MicroBatch) -> Tensor:
        after = norm.denormalize(stage_values)
        before = torch.where(micro.data["response_mask"], shifted(after, micro.position_ids), 0.0)
        return torch.stack((before, after), dim=1)

    rows = engine.inference(batch, output, context.micro_batches)
    if rows is None or not engine.is_head:
        return CallOutput()
    before, after = rows.values.reshape(sum(rows.lengths), 2).unbind(1)
    data = {"values": Packed(before, rows.lengths)}
    if _ppo(context).truncated_responses == "bootstrap":
        last = torch.tensor(rows.lengths, dtype=torch.int64, device=engine.device).cumsum(0) - 1
        data["final_values"] = Packed(after[last], (1,) * len(batch))
    return CallOutput(SampleBatch(batch.ids, data))


def actor_train(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """Optimizer steps on the clipped policy loss (`clipped_loss`); none during the critic's warm-up.

    The loss of a mini-batch is the mean over its response tokens, of all replicas. It has no KL term: the KL penalty
    is in the rewards (`learning_targets`).
    Metrics: those of `learning_targets` and `policy_steps`.
    """
    config, batch = _ppo(context), without_skipped(batch)
    targets = learning_targets(engine, batch, context)
    engine.state.update(targets.state)
    if context.iteration < config.critic_warmup_iterations:
        return CallOutput(metrics={**targets.metrics, "policy/steps": 0.0})
    objective = Objective(
        token_ratio,
        partial(clipped_loss, low=config.cliprange, high=config.cliprange, dual_clip=config.dual_clip),
        per_token,
        early_stop_ratio=config.early_stop_ratio,
    )
    tokens = targets.mini_batch_tokens
    metrics = policy_steps(
        engine,
        batch,
        context,
        objective,
        targets.advantages,
        batch["response_mask"].values,
        Counts([], tokens, tokens),
        first_iteration=config.critic_warmup_iterations,
    )
    return CallOutput(metrics={**targets.metrics, **metrics})


def critic_train(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """Optimizer steps on the clipped value loss (`value_loss`), with normalised targets if `normalize_values` is set.

    The loss of a mini-batch is the mean over its response tokens, of all replicas.
    First the running mean and std are updated with this iteration's returns. Values are clipped around the old
    values. These are normalised with the mean and std of the inference, so they equal the model's outputs then.
    Metrics: loss/value and value/clip_ratio (means over the response tokens), grad_norm/critic, learning_rate/critic,
    skipped_steps/critic.
    """
    config, batch = _ppo(context), without_skipped(batch)
    targets = learning_targets(engine, batch, context)
    engine.state.update(targets.state)
    before = after = ValueNorm.of(engine.state)
    if config.normalize_values:
        after = before.updated(targets.returns_mean, targets.returns_square)
        after.put(engine.state)
    lengths = batch["input_ids"].lengths
    learned = SampleBatch(
        batch.ids,
        {
            "input_ids": batch["input_ids"],
            "response_mask": batch["response_mask"],
            "old_values": Packed(before.normalize(batch["values"].values), lengths),
            "returns": Packed(after.normalize(targets.returns), lengths),
        },
    )

    def loss(stage_values: Tensor, micro: MicroBatch) -> LossTerms:
        mask, data = micro.data["response_mask"], micro.data
        values = shifted(stage_values, micro.position_ids)
        terms, clipped = value_loss(values, data["old_values"], data["returns"], config.cliprange_value)
        return LossTerms(torch.where(mask, terms, 0.0).sum(), {"clip_ratio": (mask & clipped).sum()})

    steps = Steps(engine, loss, targets.mini_batch_tokens, context.micro_batches, ["clip_ratio"])
    settings = config.critic_optimizer
    for step in optimizer_steps(learned, context, settings, config.num_ppo_epochs):
        if targets.mini_batch_tokens[
            step.block
        ]:  # else only the optimizer's momentum would change the weights
            steps.take(step)
    return CallOutput(
        metrics={
            "loss/value": steps.mean("loss"),
            "value/clip_ratio": steps.mean("clip_ratio"),
            **steps.end("critic"),
        }
    )


def _ppo(context: CallContext) -> PPOConfig:
    assert isinstance(context.config, PPOConfig), f"{context.config.type} runs have no such call"
    return context.config
