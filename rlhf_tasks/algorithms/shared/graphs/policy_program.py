"""What the programs of algorithms without a critic share. Torch-free."""

from rlhf_tasks.algorithms.shared.graphs.program import Handle, Models
from rlhf_tasks.algorithms.shared.graphs.rollout_calls import KEPT, SEQUENCES, PolicySizes, scored


def rollout(models: Models, prompts: Handle, config: PolicySizes) -> Handle:
    """Responses with their scores, and with the reference's log-probabilities where the KL divergence counts."""
    samples = models.actor.generate(prompts.repeat(config.group_size))
    samples |= models.reward.score(samples)
    if config.beta > 0:
        samples |= models.ref.logprobs(samples)
    return samples


def learned(config: PolicySizes, compared: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The keys that the actor's train call reads. compared: those with which scores are compared."""
    ref = ("ref_logprobs",) if config.beta > 0 else ()
    cut = ("truncated",) if config.mask_truncated_completions else ()
    kept = KEPT if config.records_kept else ()
    return (*SEQUENCES, "old_logprobs", *ref, *scored(config), *compared, *cut, *kept)
