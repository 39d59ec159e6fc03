"""KTO's calls (arXiv:2402.01306). Each runs on all ranks of its call's mesh: ref_inference, then actor_train."""

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.algorithms.kto import KTOConfig
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext, CallOutput
from prefect_rlhf.rlhf_tasks.algorithms.shared.preference import (
    ANSWER,
    SequenceKeys,
    answer_logps,
    reference_logps,
    side_by_side,
)
from prefect_rlhf.rlhf_tasks.algorithms.shared.schedule import Steps, counts_per_block, optimizer_steps
from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine, LossTerms


def answer_loss(
    ratios: Tensor,
    desirable: Tensor,
    kl: Tensor,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """The loss of each answer: [n] (arXiv:2402.01306, section 4).

    ratios     [n] log-ratios r: log-probability of the answer under the policy less that under the reference
    desirable  [n] bool
    kl         the reference point z0, without a gradient: scalar or [n]
    Desirable answers: desirable_weight (1 - sigmoid(beta (r - z0))); others: undesirable_weight (1 - sigmoid(beta
    (z0 - r))).
    """
    gain = torch.where(desirable, ratios - kl, kl - ratios)
    weights = torch.where(
        desirable, ratios.new_tensor(desirable_weight), ratios.new_tensor(undesirable_weight)
    )
    return weights * torch.sigmoid(-beta * gain)


def reference_point(ratios_sum: float, n: float) -> float:
    """z0: the estimate of KL(policy || reference), never negative (arXiv:2402.01306, section 4).

    ratios_sum  sum of the log-ratios of n mismatched answers: each belongs to another prompt
    A sum that is not a number stays so.
    """
    kl = ratios_sum / n
    return 0.0 if kl < 0 else kl


OWN: SequenceKeys = {"input_ids": "input_ids", "response_mask": "response_mask"}
MISMATCHED: SequenceKeys = {"input_ids": "mismatched_ids", "response_mask": "mismatched_mask"}
SIDES = ("chosen", "rejected")  # TRL's words for desirable answers and the others
SUMS = ("kl", *(f"{what}/{side}" for side in SIDES for what in ("count", "rewards", "logps")))


def ref_inference(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """Compute `ref_logps` and `ref_mismatched_logps`: the answers' log-probabilities under the reference."""
    sequences = {"ref_logps": OWN, "ref_mismatched_logps": MISMATCHED}
    return reference_logps(engine, batch, sequences, context.micro_batches)


def actor_train(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """One optimizer step per mini-batch, on the mean loss over all its answers, of all replicas.

    Before each step the KL between policy and reference is estimated from the mini-batch's mismatched answers.
    Metrics, over the iteration: loss/kto and kl (means over the answers); count/chosen and count/rejected (desirable
    answers, and others); rewards/chosen, rewards/rejected (mean of beta times the log-ratio of policy and reference),
    logps/chosen, logps/rejected (mean, in nats) and rewards/margins, as far as there are such answers; and
    grad_norm/actor, learning_rate/actor, skipped_steps/actor.
    """
    config = context.config
    assert isinstance(config, KTOConfig)

    def loss(logits: Tensor, micro: MicroBatch) -> LossTerms:
        return _answer_terms(config, answer_logps(engine, logits, micro), micro)

    answers = engine.sum_over_dp(counts_per_block(batch, context).to(engine.device)).tolist()
    steps = Steps(engine, loss, answers, context.micro_batches, SUMS, counted=ANSWER)
    for step in optimizer_steps(batch, context, config.optimizer):
        kl = _kl(engine, step.batch, context.micro_batches, answers[step.block])
        ones = (1,) * len(step.batch)
        known = torch.full((len(ones),), kl, dtype=torch.float64, device=engine.device)
        own = side_by_side(step.batch, [{**OWN, "ref_logps": "ref_logps", "desirable": "desirable"}])
        steps.take(step._replace(batch=SampleBatch(own.ids, {**own.data, "kl": Packed(known, ones)})))
    return CallOutput(metrics={"loss/kto": steps.mean("loss"), **_metrics(steps), **steps.end("actor")})


def _kl(engine: Engine, batch: SampleBatch, micro_batches: int, n: float) -> float:
    """The reference point of one mini-batch of n answers, over all replicas. Collective over the mesh."""
    rows = engine.inference(
        side_by_side(batch, [MISMATCHED]),
        lambda logits, micro: answer_logps(engine, logits, micro),
        micro_batches,
        counted=ANSWER,
    )
    total = torch.zeros(1, dtype=torch.float64, device=engine.device)
    if rows is not None:
        total += (rows.values.double() - batch["ref_mismatched_logps"].values.double()).sum()
    return reference_point(engine.sum_over_dp(total).item(), n)


def _answer_terms(config: KTOConfig, logps: Tensor, micro: MicroBatch) -> LossTerms:
    """The loss of one micro-batch of n answers, and the sums over them for the metrics. logps: [n]."""
    desirable, kl = micro.data["desirable"], micro.data["kl"]
    ratios = logps - micro.data["ref_logps"]
    weights = config.desirable_weight, config.undesirable_weight
    losses = answer_loss(ratios, desirable, kl.to(ratios.dtype), config.beta, *weights)
    sums = {"kl": kl.sum()}
    for side, of in zip(SIDES, (desirable, ~desirable), strict=True):
        sums[f"count/{side}"] = of.sum()
        sums[f"rewards/{side}"] = config.beta * ratios[of].sum()
        sums[f"logps/{side}"] = logps[of].sum()
    return LossTerms(losses.sum(), sums)


def _metrics(steps: Steps) -> dict[str, float]:
    """The metrics that are about answers of one kind: means over those, where there are any."""
    metrics = {"kl": steps.mean("kl")}
    for side in SIDES:
        count = metrics[f"count/{side}"] = steps.total(f"count/{side}")
        if count:
            metrics |= {
                f"{what}/{side}": steps.total(f"{what}/{side}") / count for what in ("rewards", "logps")
            }
    if "rewards/chosen" in metrics and "rewards/rejected" in metrics:
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return metrics
