"""GRPO's and PPO's graphs as lists of calls. Import as `tests.rlhf_tasks.algorithms.listed`."""

from typing import Any

from prefect_rlhf.rlhf_tasks.spec import ModelFunctionCall

SEQUENCES = ("input_ids", "response_mask")
KEPT = ("kept_counts", "kept_tokens")


def _rollout(config: Any) -> list[ModelFunctionCall]:
    sizes = {"n_seqs": config.batch_size, "group_size": config.group_size}
    kept = KEPT if config.records_kept else ()
    generate = ModelFunctionCall(
        name="actor_generate",
        role="actor",
        kind="generate",
        inputs=("prompt_ids",),
        outputs=(*SEQUENCES, "old_logprobs", "truncated", *kept),
        **sizes,
    )
    score = ModelFunctionCall(
        name="reward_inference",
        role=config.scoring_role,
        kind="inference",
        inputs=(*SEQUENCES, "truncated", "columns"),
        outputs=("scores",),
        runs_model=config.scoring_role == "reward",
        **sizes,
    )
    ref = ModelFunctionCall(
        name="ref_inference",
        role="ref",
        kind="inference",
        inputs=(*SEQUENCES, *kept),
        outputs=("ref_logprobs",),
        remap={"ref_logprobs": "logprobs"},
        **sizes,
    )
    return [generate, score, ref] if "ref" in config.roles() else [generate, score]


def _train(config: Any, role: str, inputs: tuple[str, ...]) -> ModelFunctionCall:
    return ModelFunctionCall(
        name=f"{role}_train",
        role=role,
        kind="train_step",
        inputs=inputs,
        n_seqs=config.batch_size,
        group_size=config.group_size,
        mini_batches=config.num_mini_batches,
    )


def grpo(config: Any) -> list[ModelFunctionCall]:
    """A configuration with one round and without skipped samples."""
    ref = ("ref_logprobs",) if config.beta > 0 else ()
    cut = ("truncated",) if config.mask_truncated_completions else ()
    kept = KEPT if config.records_kept else ()
    read = (*SEQUENCES, "old_logprobs", *ref, "scores", *cut, *kept)
    return [*_rollout(config), _train(config, "actor", read)]


def ppo(config: Any) -> list[ModelFunctionCall]:
    """A configuration that keeps the scores of truncated responses."""
    kept = KEPT if config.records_kept else ()
    read = (*SEQUENCES, "old_logprobs", "ref_logprobs", "values", "scores")
    values = ModelFunctionCall(
        name="critic_inference",
        role="critic",
        kind="inference",
        inputs=SEQUENCES,
        outputs=("values",),
        n_seqs=config.batch_size,
        group_size=config.group_size,
    )
    return [
        *_rollout(config),
        values,
        _train(config, "actor", (*read, *kept)),
        _train(config, "critic", read),
    ]
