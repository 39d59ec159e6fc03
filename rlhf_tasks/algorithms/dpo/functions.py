"""DPO's calls (arXiv:2305.18290). Each runs on all ranks of its call's mesh: ref_inference, then actor_train."""

from typing import assert_never

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from prefect_rlhf.rlhf_tasks.algorithms.dpo import DPOConfig, LossType
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext, CallOutput
from prefect_rlhf.rlhf_tasks.algorithms.shared.preference import (
    ANSWER,
    CHOSEN,
    REJECTED,
    answer_logps,
    reference_logps,
    side_by_side,
)
from prefect_rlhf.rlhf_tasks.algorithms.shared.schedule import Steps, counts_per_block, optimizer_steps
from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine, LossTerms


def pair_loss(
    chosen: Tensor, rejected: Tensor, loss_type: LossType, beta: float, label_smoothing: float = 0.0
) -> Tensor:
    """The loss of each pair: [n].

    chosen, rejected  [n] log-ratios: log-probability of the answer under the policy less that under the reference;
                      for ipo divided by the answer's tokens
    With d = chosen - rejected:
        sigmoid  -(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d), e = label_smoothing: arXiv:2305.18290, eq. 7,
                 and its conservative form, in which a label is wrong with probability e (Mitchell, 2023)
        ipo      (d - 1 / (2 beta))^2: arXiv:2310.12036, eq. 17. Its authors average over tokens, so that the target
                 does not depend on lengths
        hinge    max(0, 1 - beta d): SLiC (arXiv:2305.10425), on log-ratios as in RSO (arXiv:2309.06657)
    """
    d = chosen - rejected
    match loss_type:
        case "sigmoid":
            right, wrong = logsigmoid(beta * d), logsigmoid(-beta * d)
            return -(1 - label_smoothing) * right - label_smoothing * wrong
        case "ipo":
            return (d - 1 / (2 * beta)).square()
        case "hinge":
            return relu(1 - beta * d)
        case _:
            assert_never(loss_type)


SUMS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)


def ref_inference(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """Compute `ref_chosen_logps` and `ref_rejected_logps`: the answers' log-probabilities under the reference."""
    sequences = {"ref_chosen_logps": CHOSEN, "ref_rejected_logps": REJECTED}
    return reference_logps(engine, batch, sequences, context.micro_batches)


def actor_train(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """One optimizer step per mini-batch, on the mean loss over all its pairs, of all replicas.

    Metrics, means over the iteration's pairs: loss/dpo; rewards/chosen and rewards/rejected (beta times the log-ratio
    of policy and reference); rewards/margins (their difference); rewards/accuracies (fraction of pairs with a
    positive margin); logps/chosen and logps/rejected in nats; and grad_norm/actor, learning_rate/actor,
    skipped_steps/actor.
    """
    config = context.config
    assert isinstance(config, DPOConfig)

    def loss(logits: Tensor, micro: MicroBatch) -> LossTerms:
        return _pair_terms(config, answer_logps(engine, logits, micro), micro)

    pairs = engine.sum_over_dp(counts_per_block(batch, context).to(engine.device))
    steps = Steps(engine, loss, pairs.tolist(), context.micro_batches, SUMS, counted=ANSWER)
    sequences = [
        {**CHOSEN, "ref_logps": "ref_chosen_logps"},
        {**REJECTED, "ref_logps": "ref_rejected_logps"},
    ]
    for step in optimizer_steps(batch, context, config.optimizer):
        steps.take(step._replace(batch=side_by_side(step.batch, sequences)))
    metrics = {name: steps.mean(name) for name in SUMS}
    return CallOutput(metrics={"loss/dpo": steps.mean("loss"), **metrics, **steps.end("actor")})


def _pair_terms(config: DPOConfig, logps: Tensor, micro: MicroBatch) -> LossTerms:
    """The loss of one micro-batch of n pairs, and the sums over them for the metrics.

    logps  [2 n], of the chosen and the rejected answer of each pair in turn
    """
    ratios = logps - micro.data["ref_logps"]
    rewards = config.beta * ratios.detach()
    if config.loss_type == "ipo":
        tokens = torch.stack([mask.sum() for mask in micro.per_sample(micro.data["response_mask"])])
        ratios = ratios / tokens
    losses = pair_loss(ratios[0::2], ratios[1::2], config.loss_type, config.beta, config.label_smoothing)
    margins = rewards[0::2] - rewards[1::2]
    sums = {
        "rewards/chosen": rewards[0::2],
        "rewards/rejected": rewards[1::2],
        "rewards/accuracies": margins > 0,
        "rewards/margins": margins,
        "logps/chosen": logps[0::2],
        "logps/rejected": logps[1::2],
    }
    return LossTerms(losses.sum(), {name: values.sum() for name, values in sums.items()})
