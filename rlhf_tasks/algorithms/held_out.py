"""The evaluation of a training run as the evaluation of a model: which rows, which rewards. Torch-free."""

import json
from collections.abc import Iterable
from typing import Any

from prefect_rlhf.rlhf_tasks.algorithms.evaluate import AnsweringConfig, EvaluateConfig
from prefect_rlhf.rlhf_tasks.algorithms.sft import SFTConfig
from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from prefect_rlhf.rlhf_tasks.config.data import DataConfig
from prefect_rlhf.rlhf_tasks.config.generation import GenerationConfig
from prefect_rlhf.rlhf_tasks.config.models import ActorOnly, RolloutModels
from prefect_rlhf.rlhf_tasks.config.responses import EvaluationConfig, RewardConfig
from prefect_rlhf.rlhf_tasks.config.sampling import Samples, Scores
from prefect_rlhf.rlhf_tasks.config.training import TrainingConfig
from prefect_rlhf.rlhf_tasks.data.dataset import DataError, PlacedRow, Row, data_set

MOST_AT_ONCE = 64  # answers to held-out rows
HELD_OUT, COMPLETIONS = "held-out.arrow", "held-out-completions.arrow"
"""The tokenised held-out rows in a run folder: to answer, and with their completions."""


def section_of(config: RunConfig) -> EvaluationConfig | None:
    """The section `evaluation` of a run; None where it has none."""
    return config.evaluation if isinstance(config, TrainingConfig) else None


def held_out_sets(config: RunConfig) -> dict[str, RunConfig]:
    """File in the run folder -> the configuration by whose rules the held-out rows in it are read."""
    readers = {HELD_OUT: evaluation_of(config), COMPLETIONS: completions_of(config)}
    return {name: reader for name, reader in readers.items() if reader is not None}


def completions_of(config: RunConfig) -> SFTConfig | None:
    """The supervised fine-tuning whose loss on the held-out rows is `eval/loss`; None where that is not asked for."""
    section = section_of(config)
    if section is None or not section.loss:
        return None
    data = _data(config, section)
    if isinstance(config, SFTConfig):
        return config.model_copy(update={"data": data})
    models = ActorOnly(actor=config.models.actor)
    return SFTConfig(models=models, data=data, output_dir=config.output_dir, total_iterations=1)


def evaluation_of(config: RunConfig) -> EvaluateConfig | None:
    """What a run with the section `evaluation` does as `type: evaluate` would; None where nothing scores its
    answers. An environment of the run answers those, too.

    The model is the one that trains: `models.actor` gives its tokenizer and its context. A batch has whole rows.
    """
    if not isinstance(config, TrainingConfig) or config.evaluation is None:
        return None
    section, rewards = config.evaluation, config.rewards_of_evaluation
    environment, agent = (config.environment, config.agent) if isinstance(config, Scores) else (None, None)
    tools, named = (config.tools, config.tool_format) if isinstance(config, Scores) else ((), None)
    if not (rewards or agent or (environment and not tools)):
        return None
    tokens, stops, generation = section.max_completion_length, {}, GenerationConfig()
    if isinstance(config, Samples):
        sampling, generation = config.sampling, config.generation
        tokens = tokens or sampling.max_completion_length
        stops = {
            "min_new_tokens": min(sampling.min_new_tokens, tokens),
            "stop": sampling.stop,
        }
    assert tokens is not None, "the configuration has checked this"
    return EvaluateConfig(
        models=RolloutModels(actor=config.models.actor),
        data=_data(config, section),
        output_dir=config.output_dir,
        seed=config.seed,
        dtype=config.dtype,
        rewards=tuple(reward.model_copy(update={"used_in": "both"}) for reward in rewards),
        environment=environment,
        agent=agent,
        tools=tools,
        tool_format=named,
        sampling=AnsweringConfig(max_completion_length=tokens, temperature=section.temperature, **stops),
        generation=generation,
        num_generations=section.num_generations,
        batch_size=rows_at_once(config) * section.num_generations,
        cluster=config.cluster,
        on_reward_error=config.on_reward_error,
        reward_timeout_s=config.reward_timeout_s,
        reward_processes=config.reward_processes,
        reward_memory_bytes=config.reward_memory_bytes,
    )


def rows_at_once(config: RunConfig) -> int:
    """Held-out rows that all ranks compute together, at least one: as many as have a batch's number of answers, at
    most `MOST_AT_ONCE`: an evaluation has one micro-batch."""
    section = section_of(config)
    return max(1, min(MOST_AT_ONCE, config.batch_size) // (1 if section is None else section.num_generations))


def scoring_rewards_of(config: RunConfig) -> tuple[RewardConfig, ...]:
    """The rewards of the run's own samples."""
    return config.scoring_rewards if isinstance(config, Scores) else ()


def shared_prompts(config: RunConfig) -> str | None:
    """A warning where the training data have prompts of the held-out rows; None where they have none.

    Both data sets are read once. Raises DataError for a malformed held-out row.
    """
    section = section_of(config)
    if section is None:
        return None
    held_out = {prompt: placed.where for prompt, placed in _prompts(data_set(_data(config, section)))}
    rows = data_set(config.data).rows(_leave_out)
    trained = {prompt for prompt, _ in _prompts(rows) if prompt in held_out}
    if not trained:
        return None
    first = next(where for prompt, where in held_out.items() if prompt in trained)
    return (
        f"evaluation: {len(trained)} of {len(held_out)} held-out prompts are also in {config.data.name} (the first: "
        f"{first}). On these the scores do not tell how well the model does on prompts that it has not seen."
    )


def _data(config: RunConfig, section: EvaluationConfig) -> DataConfig:
    """The held-out rows: read as the run's own are, but all of them, and none may be bad."""
    return config.data.model_copy(update={"train": section.data, "max_rows": None, "on_bad_row": "refuse"})


def _prompts(rows: Iterable[PlacedRow]) -> Iterable[tuple[str, PlacedRow]]:
    """(prompt as JSON, row) of the rows that have a prompt of their own."""
    for placed in rows:
        if (prompt := _prompt(placed.row)) is not None:
            yield json.dumps(prompt, sort_keys=True, default=str), placed


def _prompt(row: Row) -> Any:
    """A row's prompt; of a conversation all but its last turn."""
    if "prompt" in row:
        return row["prompt"]
    messages = row.get("messages")
    return messages[:-1] if isinstance(messages, list) else None


def _leave_out(where: str, error: DataError) -> None:
    """A malformed row of the training data: that it is skipped has been said."""
