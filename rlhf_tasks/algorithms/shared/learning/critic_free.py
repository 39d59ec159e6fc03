"""The train call of algorithms without a learned critic: what it does with the advantages of its responses."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlhf_tasks.algorithms.shared.context import CallContext, CallOutput
from rlhf_tasks.algorithms.shared.learning.groups import all_equal, per_group
from rlhf_tasks.algorithms.shared.learning.packed import on_tokens
from rlhf_tasks.algorithms.shared.learning.policy_math import kl_divergence
from rlhf_tasks.algorithms.shared.learning.policy_steps import Counts, Objective, Weights, policy_steps
from rlhf_tasks.algorithms.shared.learning.schedule import counts_per_block
from rlhf_tasks.algorithms.shared.policy_config import CriticFreeConfig
from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from rlhf_tasks.parallel.train.engine import Engine
from rlhf_tasks.rewards.forms import RewardError
from rlhf_tasks.rewards.samples_folder import SKIPPED_SAMPLES

Weighting = Callable[[Tensor, Sequence[int], Counts, int], Weights]
"""`per_token` and its like in policy_steps.py."""


def learn(
    engine: Engine,
    batch: SampleBatch,
    context: CallContext,
    advantages: Tensor,
    objective: Objective,
    weighting: Weighting,
    kl_estimator: str = "k3",
    ids: Sequence[int] | None = None,
) -> CallOutput:
    """Optimizer steps on the responses, without those truncated where the configuration masks them.

    advantages    [T]
    kl_estimator  of the metric kl
    ids           of the responses, of all replicas, that stay in the batch, in whole groups; mini-batches are cut
                  from these. None: all stay
    Metrics, besides those of `policy_steps`: kl (with a reference: mean KL per sequence of the policy that sampled,
    in nats), frac_reward_zero_std (with groups: share of the samples whose group's scores are all equal).
    Raises RewardError when the batch is empty on all replicas.
    """
    config, scores = context.config, batch["scores"].values
    assert isinstance(config, CriticFreeConfig), f"{config.type} runs have a critic"
    kl = reference_kl(batch, kl_estimator).double().sum() if config.beta > 0 else scores.new_zeros(())
    equal = per_group(all_equal, scores, batch.ids, config.group_size).sum()
    whole = torch.stack([kl.double(), equal.double(), scores.new_tensor(len(batch), dtype=torch.float64)])
    of_tokens = {"advantages": Packed(advantages, batch["input_ids"].lengths)}
    batch = SampleBatch(batch.ids, {**batch.data, **of_tokens})
    if ids is not None:
        learned_from = set(ids)
        batch = batch.take([place for place, sample in enumerate(batch.ids) if sample in learned_from])

    lengths, learned = batch["input_ids"].lengths, batch["response_mask"].values
    if config.mask_truncated_completions:
        learned = learned & ~on_tokens(batch["truncated"].values, lengths)
    marks = SampleBatch(batch.ids, {"learned": Packed(learned, lengths), "tokens": batch["response_mask"]})
    counted = torch.cat([counts_per_block(marks, context, key, ids) for key in (None, "learned", "tokens")])
    own = torch.cat([counted.to(engine.device), whole])
    *totals, total_kl, total_equal, n_samples = engine.sum_over_dp(own).tolist()
    if not n_samples:
        raise RewardError(
            f"a reward failed on every sample of iteration {context.iteration}, so none is left to learn from. "
            f"{SKIPPED_SAMPLES} in the run folder has the reasons."
        )
    n = config.num_mini_batches
    counts = Counts(totals[:n], totals[n : 2 * n], totals[2 * n :])

    metrics: dict[str, float] = {}
    if config.beta > 0:
        metrics["kl"] = total_kl / n_samples
    if config.group_size > 1:
        metrics["frac_reward_zero_std"] = total_equal / n_samples
    weights = weighting(learned, lengths, counts, config.sampling.max_completion_length)
    steps = policy_steps(
        engine,
        batch,
        context,
        objective,
        batch["advantages"].values,
        weights,
        counts.tokens,
        epochs=config.num_iterations,
        ids=ids,
    )
    return CallOutput(metrics=metrics | steps)


def reference_kl(batch: SampleBatch, estimator: str) -> Tensor:
    """KL of the policy that sampled from the reference, per token: [T], 0 outside responses."""
    kl = kl_divergence(batch["old_logprobs"].values, batch["ref_logprobs"].values, estimator)
    return torch.where(batch["response_mask"].values, kl, 0.0)
