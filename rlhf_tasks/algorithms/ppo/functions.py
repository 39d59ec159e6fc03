"""PPO's calls (arXiv:1707.06347; arXiv:2203.02155).

Each function runs on all ranks of its call's mesh. Their order: actor_generate; then reward_inference, ref_inference
and critic_inference; then actor_train and critic_train.
"""

from functools import partial

import torch
from torch import Tensor

from rlhf_tasks.algorithms.ppo.config import PPOConfig
from rlhf_tasks.algorithms.ppo.learning import learning_targets
from rlhf_tasks.algorithms.ppo.ppo_math import log_ratio, policy_loss, shifted, value_loss
from rlhf_tasks.algorithms.ppo.value_norm import ValueNorm
from rlhf_tasks.algorithms.shared.context import CallContext, CallOutput
from rlhf_tasks.algorithms.shared.generation import actor_generate
from rlhf_tasks.algorithms.shared.reward_call import reward_inference
from rlhf_tasks.algorithms.shared.schedule import optimizer_steps
from rlhf_tasks.algorithms.shared.steps import Steps
from rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from rlhf_tasks.parallel.train.engine import Engine, LossTerms

__all__ = [
    "actor_generate",
    "actor_train",
    "critic_inference",
    "critic_train",
    "ref_inference",
    "reward_inference",
]


def ref_inference(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """Compute `logprobs` of the responses under a frozen model, at the temperature of sampling.

    Tokens that top-k and top-p left out are left out here too. So the KL penalty compares distributions over the same
    tokens, and it is 0 where policy and reference are equal.
    """
    temperature = _ppo(context).sampling.temperature

    def output(logits: Tensor, micro: MicroBatch) -> Tensor:
        return engine.logprobs(logits, micro, temperature)

    rows = engine.inference(batch, output, context.micro_batches, counted="response_mask")
    if rows is None or not engine.is_head:
        return CallOutput()
    return CallOutput(SampleBatch(batch.ids, {"logprobs": rows}))


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
    """Optimizer steps on the clipped policy loss; none during the critic's warm-up.

    Once a step's mean ratio over its global mini-batch exceeds `early_stop_ratio`, the iteration's remaining steps
    are skipped on all ranks. Metrics, besides those of `learning_targets`:
        loss/policy, entropy (nats), clip_ratio, policy/ratio, policy/approx_kl (nats; estimator k3): means over
            the response tokens of the applied steps
        policy/mismatch: mean |logprobs - old_logprobs| before the first step; only rounding, unless there is a fault
        policy/steps (number of applied steps), grad_norm/actor, learning_rate/actor, skipped_steps/actor
    """
    config = _ppo(context)
    targets = learning_targets(engine, batch, context)
    engine.state.update(targets.state)
    if context.iteration < config.critic_warmup_iterations:
        return CallOutput(metrics={**targets.metrics, "policy/steps": 0.0})
    lengths = batch["input_ids"].lengths
    kept = ("kept_counts", "kept_tokens") if config.records_kept else ()
    learned = SampleBatch(
        batch.ids,
        {key: batch[key] for key in ("input_ids", "response_mask", "old_logprobs", *kept)}
        | {"advantages": Packed(targets.advantages, lengths)},
    )

    loss = partial(_policy_terms, engine, config)
    steps = Steps(
        engine, loss, targets.mini_batch_tokens, context.micro_batches, POLICY_SUMS, counted="response_mask"
    )
    mismatch = 0.0
    first = config.critic_warmup_iterations
    for step in optimizer_steps(learned, context, config.optimizer, config.num_ppo_epochs, first):
        unchanged = steps.applied == 0
        means = steps.take(step)
        if unchanged:
            mismatch = means["mismatch"]
        if config.early_stop_ratio is not None and means["ratio"] > config.early_stop_ratio:
            break
    metrics = {
        "loss/policy": steps.mean("loss"),
        "entropy": steps.mean("entropy"),
        "clip_ratio": steps.mean("clip_ratio"),
        "policy/ratio": steps.mean("ratio"),
        "policy/approx_kl": steps.mean("approx_kl"),
        "policy/mismatch": mismatch,
        "policy/steps": float(steps.applied),
        **steps.end("actor"),
    }
    return CallOutput(metrics={**targets.metrics, **metrics})


POLICY_SUMS = ("ratio", "entropy", "clip_ratio", "approx_kl", "mismatch")


def _policy_terms(engine: Engine, config: PPOConfig, logits: Tensor, micro: MicroBatch) -> LossTerms:
    """The clipped loss of one micro-batch, and the sums over its response tokens for the metrics."""
    mask, old = micro.data["response_mask"], micro.data["old_logprobs"]
    logprobs, entropy = engine.logprobs_and_entropy(logits, micro, config.sampling.temperature)
    terms, ratio, clipped = policy_loss(
        logprobs, old, micro.data["advantages"], config.cliprange, config.dual_clip
    )
    change = log_ratio(logprobs, old).detach()
    sums = {
        "ratio": ratio,
        "entropy": entropy.detach(),
        "clip_ratio": clipped,
        "approx_kl": torch.expm1(change) - change,
        "mismatch": change.abs(),
    }
    return LossTerms(
        torch.where(mask, terms, 0.0).sum(),
        {name: torch.where(mask, values, 0).sum() for name, values in sums.items()},
    )


def critic_train(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """Optimizer steps on the clipped value loss, with normalised targets where `normalize_values` is set.

    First the running mean and std are updated with this iteration's returns. The old values, around which values are
    clipped, are normalised with the mean and std of the inference, so they are what the model gave then.
    Metrics: loss/value and value/clip_ratio (means over the response tokens), grad_norm/critic, learning_rate/critic,
    skipped_steps/critic.
    """
    config = _ppo(context)
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
        terms, clipped = value_loss(
            values, data["old_values"], data["returns"], config.cliprange_value, config.value_huber_delta
        )
        return LossTerms(torch.where(mask, terms, 0.0).sum(), {"clip_ratio": (mask & clipped).sum()})

    steps = Steps(engine, loss, targets.mini_batch_tokens, context.micro_batches, ["clip_ratio"])
    settings = config.critic_optimizer or config.optimizer
    for step in optimizer_steps(learned, context, settings, config.num_ppo_epochs):
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
