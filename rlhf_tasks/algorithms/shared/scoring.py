"""Scores of responses: the weighted sum of Python rewards and the reward model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_tasks.algorithms.shared.context import CallContext
from rlhf_tasks.config.base import Scores
from rlhf_tasks.config.sections import RewardModelScore
from rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from rlhf_tasks.parallel.train.engine import Engine
from rlhf_tasks.rewards.forms import Answers, RewardError, Values, shortened
from rlhf_tasks.rewards.process import Judged
from rlhf_tasks.system.failpoints import Point, reach

PROMPT_CHARACTERS = 100
"""Characters of a prompt that are shown in an error."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of one head's n samples, in the batch's order.

    scores        [n] float64, the weighted sum
    rewards       name of a Python reward -> n values; None for a sample that it does not judge
    logged        name of a Python reward -> the values that it logged, see `Judged`
    reward_model  [n] float64, raw scores of the reward model; None without one
    answers       the samples as the rewards got them
    """

    scores: Tensor
    rewards: Mapping[str, Values]
    logged: Mapping[str, Mapping[str, Any]]
    reward_model: Tensor | None
    answers: Answers


def scores_batch(batch: SampleBatch, scored: Scored, engine: Engine) -> SampleBatch:
    """The key `scores`, one row per sample: float64 if the model is float64, else float32."""
    scores = scored.scores.to(engine.device, engine.dtype_of_rows)
    return SampleBatch(batch.ids, {"scores": Packed(scores, (1,) * len(batch))})


def score(engine: Engine, batch: SampleBatch, context: CallContext, all_judged: bool = True) -> Scored | None:
    """Score this replica's samples. Returns the scores on the head, None elsewhere.

    all_judged  False: samples that no reward judges are no error, as where nothing is learned from them

    The Python rewards run in the head's helper process while the reward model computes; not where there is no sample.
    Raises RewardError, naming the sample, when a Python reward fails or times out, or when there is no reward model
    and the Python rewards judge no sample.
    """
    config = context.config
    assert isinstance(config, Scores), f"{config.type} runs do not score"
    answers = read_answers(batch, context) if engine.is_head else None
    pending = (
        context.rewards.submit(answers, context.iteration) if answers is not None and len(batch) else None
    )
    raw = None
    if config.scoring_role == "reward":
        rows = engine.inference(batch, last_value, context.micro_batches)
        raw = None if rows is None else rows.values.double().cpu()
    if answers is None:
        return None
    try:
        judged = (
            Judged({each.name: [] for each in config.rewards}, {}) if pending is None else pending.result()
        )
        rewards = judged.values
        if raw is None and all_judged and len(batch):
            _refuse_unjudged(rewards)
    except RewardError as error:
        raise RewardError(f"{error}{_about(error.place, batch, answers, context)}", error.traceback) from None
    reach(Point.REWARD)
    total = -config.missing_eos_penalty * batch["truncated"].values.double().cpu()
    for function in config.rewards:
        total += function.weight * torch.tensor(
            [v or 0.0 for v in rewards[function.name]], dtype=torch.float64
        )
    if raw is not None:
        total += reward_model_part(raw, config.reward_model)
    return Scored(total, rewards, judged.logged, raw, answers)


def _refuse_unjudged(rewards: Mapping[str, Values]) -> None:
    """Raises RewardError when no reward judges any sample: there is nothing to learn from."""
    if rewards and all(value is None for values in rewards.values() for value in values):
        names = ", ".join(map(repr, rewards))
        raise RewardError(f"the rewards {names} returned None for every sample, so there is no score.")


def _about(place: int | None, batch: SampleBatch, answers: Answers, context: CallContext) -> str:
    """A sentence about the sample on which a reward failed: its number, its row, the start of its prompt."""
    if place is None:
        return f" It was judging samples {min(batch.ids)} to {max(batch.ids)}."
    prompt = json.dumps(shortened(answers.prompt_texts[place], PROMPT_CHARACTERS), ensure_ascii=False)
    return f" It was judging sample {batch.ids[place]} ({context.where(batch.ids[place])}, prompt {prompt})."


def reward_model_part(raw: Tensor, settings: RewardModelScore) -> Tensor:
    """The reward model's part of the scores: normalised, clipped and weighted.

    raw, result  [one entry per sample]
    """
    normalised = (raw - settings.mean) / settings.std
    if settings.clip is not None:
        normalised = normalised.clamp(-settings.clip, settings.clip)
    return settings.weight * normalised


def last_value(values: Tensor, micro: MicroBatch) -> Tensor:
    """The scalar head's output at each sample's last token: [n].

    values  [T], one per token
    """
    return values[micro.cu_seqlens[1:].long() - 1]


def read_answers(batch: SampleBatch, context: CallContext) -> Answers:
    """The prompts, responses and columns of a batch, in the form that rewards take."""
    responses = [
        ids[mask].tolist()
        for ids, mask in zip(batch["input_ids"].split(), batch["response_mask"].split(), strict=True)
    ]
    read = [
        context.tokenizer.decode(ids[~mask].tolist(), special_tokens=True)
        for ids, mask in zip(batch["input_ids"].split(), batch["response_mask"].split(), strict=True)
    ]
    texts = [context.tokenizer.decode(ids) for ids in responses]
    return Answers.of_columns(batch["columns"].texts(), texts, responses, read, context.columns())


def reward_metrics(engine: Engine, scored: Scored | None, context: CallContext) -> dict[str, float]:
    """The metrics reward and reward_std over the iteration's samples, and rewards/<name>/mean for each reward; none
    before the call's last part.

    rewards/reward_model/mean is the mean of the raw scores. Collective over the mesh.
    """
    config = context.config
    assert isinstance(config, Scores), f"{config.type} runs do not score"
    names = [function.name for function in config.rewards]
    sums = torch.zeros(3 + 2 * len(names), dtype=torch.float64)
    if scored is not None:
        sums[0] = len(scored.scores)
        sums[1] = scored.scores.sum()
        if scored.reward_model is not None:
            sums[2] = scored.reward_model.sum()
        for place, name in enumerate(names):
            values = [value for value in scored.rewards[name] if value is not None]
            sums[3 + 2 * place], sums[4 + 2 * place] = sum(values), len(values)
    of_part = engine.sum_over_dp(sums)
    mean = (of_part[1] / of_part[0].clamp(min=1)).item()
    deviations = 0.0 if scored is None else float((scored.scores - mean).square().sum())
    squares = engine.sum_over_dp(torch.tensor([deviations], dtype=torch.float64))
    parts = context.all_parts(torch.cat([of_part, squares]))
    if parts is None:
        return {}
    figures = torch.stack(parts)
    n, total, raw, *by_name, within = figures.sum(0).tolist()
    mean = total / n
    # The squares about a part's mean, and those of this mean about the whole one.
    means = figures[:, 1] / figures[:, 0].clamp(min=1)
    squares = within + (figures[:, 0] * (means - mean).square()).sum().item()
    metrics = {"reward": mean, "reward_std": (squares / max(n - 1, 1)) ** 0.5}
    for place, name in enumerate(names):
        if by_name[2 * place + 1]:
            metrics[f"rewards/{name}/mean"] = by_name[2 * place] / by_name[2 * place + 1]
    if config.scoring_role == "reward":
        metrics["rewards/reward_model/mean"] = raw / n
    return metrics
