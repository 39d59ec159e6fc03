"""The reward call: the scores of responses, weighted sums of Python rewards and the reward model, and their files.

The processes that run rewards are in rlhf_tasks/user_code.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.algorithms.shared.answers import read_answers
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext, CallOutput
from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import (
    ENVIRONMENT_FAULT,
    ENVIRONMENT_REWARDS,
    STAYS,
    TOKEN_REWARDS,
)
from prefect_rlhf.rlhf_tasks.config.responses import RewardModelScore
from prefect_rlhf.rlhf_tasks.config.sampling import Scores
from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from prefect_rlhf.rlhf_tasks.system.failpoints import Point, reach
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError, shortened
from prefect_rlhf.rlhf_tasks.user_code.forms import Answers, Values, total
from prefect_rlhf.rlhf_tasks.user_code.rewards import SAMPLES, SKIPPED_SAMPLES, Fault, Judged

EXAMPLES = 8
"""Samples per iteration that are written for users to look at."""
N_SUMS = 8
"""Figures of `reward_metrics` besides those of each reward; an even number."""
PROMPT_CHARACTERS = 100
"""Characters of a prompt that are shown in an error."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of one head's n samples, in the batch's order.

    scores        [n] float64, the weighted sum
    rewards       name of a Python reward, or of the environment -> n values, of whole responses; None for a sample
                  that it does not judge
    logged        name of a Python reward -> the values that it logged, see `Judged`
    reward_model  [n] float64, raw scores of the reward model; None without one
    answers       the samples as the rewards got them
    faults        id of a sample that a reward or the environment failed on -> the fault; its score is 0, and no
                  reward has a value
    stays         [n] bool: whether a sample stays in the batch
    of_tokens     n tensors [response tokens] float64, which add up to the scores, where a reward judges tokens or
                  steps: what is judged as a whole is at the last token
    early         how many samples some reward was asked for while others were drawn; None where none is
    waited_s      seconds that Python rewards were waited for
    """

    scores: Tensor
    rewards: Mapping[str, list[float | None]]
    logged: Mapping[str, Mapping[str, Any]]
    reward_model: Tensor | None
    answers: Answers
    faults: Mapping[int, Fault]
    stays: Tensor
    of_tokens: Sequence[Tensor] | None = None
    early: int | None = None
    waited_s: float = 0.0


def reward_inference(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """Compute `scores`, and write a few samples of the first dp rank and part. Metrics: see `reward_metrics`."""
    shown = engine.coordinate.dp == 0 and context.part.number == 0
    return score_and_write(engine, batch, context, EXAMPLES if shown else 0)


def score_and_write(
    engine: Engine, batch: SampleBatch, context: CallContext, written: int, kind: str = ""
) -> CallOutput:
    """Compute `scores`, and write this head's first `written` samples into the run folder.

    kind  begins the name of the file that lists skipped samples, where an iteration scores twice
    Metrics: see `reward_metrics`.
    """
    scored = score(engine, batch, context)
    if scored is not None:
        of_part = f"part{context.part.number}-" if context.part.of > 1 else ""
        write_skipped(engine, scored.faults, context, kind + of_part)
    metrics = reward_metrics(engine, scored, context)
    if scored is None:
        return CallOutput(None, metrics)
    if written:
        of_part = f"-{context.part.number:04d}" if context.part.number else ""
        name = f"{context.iteration:08d}-{engine.coordinate.dp:04d}{of_part}.jsonl"
        write_samples(context.run_folder / SAMPLES / name, batch, scored, written)
    return CallOutput(scores_batch(batch, scored, engine), metrics)


def scores_batch(batch: SampleBatch, scored: Scored, engine: Engine) -> SampleBatch:
    """The keys `scores` and STAYS (bool), one row per sample; TOKEN_REWARDS where a reward judges tokens or steps.

    Numbers are float64 if the model is float64, else float32.
    """
    dtype = engine.dtype_of_rows
    scores = scored.scores.to(engine.device, dtype)
    one = (1,) * len(batch)
    stays = scored.stays.to(engine.device)
    data = {"scores": Packed(scores, one), STAYS: Packed(stays, one)}
    if scored.of_tokens is not None:
        mask = batch["response_mask"]
        rewards = torch.zeros(len(mask.values), dtype=dtype, device=engine.device)
        if len(batch):
            rewards[mask.values] = torch.cat(list(scored.of_tokens)).to(engine.device, dtype)
        data[TOKEN_REWARDS] = Packed(rewards, mask.lengths)
    return SampleBatch(batch.ids, data)


def score(engine: Engine, batch: SampleBatch, context: CallContext, all_judged: bool = True) -> Scored | None:
    """Score this replica's samples. Returns the scores on the head, None elsewhere.

    all_judged  False: a sample that no reward judges is not a fault, because nothing is learned from it

    The Python rewards run in the head's helper process while the reward model computes; not if there is no sample.
    Raises RewardError, naming the sample, when a Python reward fails or times out. With `on_reward_error: skip` the
    result has faults instead: of such samples, if they are known, and of those that no reward judges.
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
        if rows is not None:  # the model judges the last sequence of a sample
            raw = torch.cat([rows.values[:0], *(part[-1:] for part in rows.split())]).double().cpu()
    if answers is None:
        return None
    began_s = time.monotonic()
    try:
        nothing = Judged({each.name: [] for each in config.scoring_rewards}, {})
        judged = nothing if pending is None else pending.result()
    except RewardError as error:
        raise RewardError(f"{error}{_about(error.place, batch, answers, context)}", error.traceback) from None
    waited_s = time.monotonic() - began_s
    reach(Point.REWARD)
    scored = _scored(batch, answers, judged, _faults(batch, judged, config, all_judged), raw, config)
    return replace(scored, early=judged.early, waited_s=waited_s)


def _faults(batch: SampleBatch, judged: Judged, config: Scores, all_judged: bool) -> dict[int, Fault]:
    """Index of each sample on which a reward or the environment failed, or that nothing judges -> the fault."""
    faults = dict(judged.faults)
    if all_judged and config.on_reward_error == "skip" and _only_rewards_judge(config):
        faults = _unjudged(judged.values, len(batch)) | faults
    if config.played is not None and ENVIRONMENT_FAULT in batch.data:
        reasons = enumerate(batch[ENVIRONMENT_FAULT].texts())
        faults |= {place: Fault(config.played.name, reason) for place, reason in reasons if reason}
    return faults


def _scored(
    batch: SampleBatch,
    answers: Answers,
    judged: Judged,
    faults: Mapping[int, Fault],
    raw: Tensor | None,
    config: Scores,
) -> Scored:
    """What rewards, environment and reward model have given, added up.

    faults  index of a sample -> its fault
    raw     [n] float64, raw scores of the reward model; None without one
    """
    rewards: dict[str, Values] = {
        name: [None if place in faults else value for place, value in enumerate(values)]
        for name, values in judged.values.items()
    }
    named = {name: [None if v is None else total(v) for v in values] for name, values in rewards.items()}
    whole = -config.missing_eos_penalty * batch["truncated"].values.double().cpu()
    environment = config.rewarding_environment
    if environment is not None:
        played = batch[ENVIRONMENT_REWARDS].values.double().cpu()
        whole = whole + played
        named[environment.name] = [
            None if place in faults else value for place, value in enumerate(played.tolist())
        ]
    model_part = None if raw is None else reward_model_part(raw, config.reward_model)
    weighted = [(function.weight, rewards[function.name]) for function in config.scoring_rewards]
    of_tokens = None
    if config.scores_tokens:
        scores, of_tokens = _of_tokens(answers, faults, whole, weighted, model_part)
    else:
        scores = whole
        for weight, values in weighted:
            scores = scores + weight * torch.tensor([v or 0.0 for v in values], dtype=torch.float64)
        scores = scores if model_part is None else scores + model_part
    failed = torch.tensor([place in faults for place in range(len(batch))], dtype=torch.bool)
    return Scored(
        torch.where(failed, 0.0, scores),
        named,
        judged.logged,
        raw,
        answers,
        {batch.ids[place]: fault for place, fault in faults.items()},
        ~failed if config.skipped_leave else torch.ones_like(failed),
        of_tokens,
    )


def _of_tokens(
    answers: Answers,
    faults: Mapping[int, Fault],
    whole: Tensor,
    weighted: Sequence[tuple[float, Values]],
    model_part: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    """([n] scores, n tensors [response tokens] of which they are the sums), float64; zeros where there is a fault.

    whole  [n] float64, penalties and the environment's rewards; others as in `rewards_of_tokens`
    """
    counts = [0 if place in faults else len(ids) for place, ids in enumerate(answers.completion_ids)]
    parts = rewards_of_tokens(counts, whole, weighted, model_part)
    scores = torch.stack([part.sum() for part in parts]) if parts else whole
    return scores, [
        part if len(part) else part.new_zeros(len(ids))
        for part, ids in zip(parts, answers.completion_ids, strict=True)
    ]


def rewards_of_tokens(
    counts: Sequence[int],
    penalties: Tensor,
    weighted: Sequence[tuple[float, Values]],
    model_part: Tensor | None,
) -> list[Tensor]:
    """The rewards at the response tokens of each sample: n tensors [count] float64.

    counts      response tokens of each sample
    penalties, model_part  [n] float64, for whole responses; penalties with the environment's rewards
    weighted    (weight, n values) of each Python reward: a number for a whole response, or one for each token
    What is for a whole response is added at its last token, in the order in which a score is added up: where nothing
    else is given, that token has the very score.
    """
    parts = [torch.zeros(count, dtype=torch.float64) for count in counts]
    for place, part in enumerate(parts):
        part[-1:] += penalties[place]
        for weight, values in weighted:
            value = values[place]
            if isinstance(value, list):
                part += weight * torch.tensor(value, dtype=torch.float64)
            else:
                part[-1:] += weight * (value or 0.0)
        if model_part is not None:
            part[-1:] += model_part[place]
    return parts


def _only_rewards_judge(config: Scores) -> bool:
    """Whether a sample has no score where every Python reward returns None for it."""
    return (
        bool(config.scoring_rewards)
        and config.scoring_role != "reward"
        and config.rewarding_environment is None
    )


def _unjudged(rewards: Mapping[str, Values], n: int) -> dict[int, Fault]:
    """The faults of samples for which every reward returned None: without a score there is nothing to learn."""
    names = ", ".join(rewards)
    fault = Fault(names, f"no reward gave a value ({names} returned None).")
    return {place: fault for place in range(n) if all(values[place] is None for values in rewards.values())}


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


def reward_metrics(engine: Engine, scored: Scored | None, context: CallContext) -> dict[str, float]:
    """The metrics reward and reward_std over the iteration's samples, and rewards/<name>/mean for each reward; none
    before the call's last part.

    rewards/reward_model/mean is the mean of the raw scores. With `on_reward_error: skip`, skipped_samples is the
    number of samples that a reward failed on; those that leave the batch are in no mean. Where a reward is asked for
    samples while others are drawn: throughput/rewards_early, their number, and throughput/rewards_waited_s, seconds
    that the call then waited for Python rewards, a mean over the heads. Collective over the mesh.
    Raises RewardError when a reward failed on every sample, or no reward judged any.
    """
    config = context.config
    assert isinstance(config, Scores), f"{config.type} runs do not score"
    names = config.score_names
    sums = torch.zeros(N_SUMS + 2 * len(names), dtype=torch.float64)
    scores = torch.zeros(0) if scored is None else scored.scores[scored.stays]
    if scored is not None:
        sums[0] = len(scores)
        sums[1] = scores.sum()
        if scored.reward_model is not None:
            sums[2] = scored.reward_model[scored.stays].sum()
        sums[3] = len(scored.faults)
        sums[4] = len(scored.scores)
        sums[5:N_SUMS] = torch.tensor([scored.early is not None, scored.early or 0, scored.waited_s])
        for place, name in enumerate(names, N_SUMS // 2):
            values = [value for value in scored.rewards[name] if value is not None]
            sums[2 * place], sums[2 * place + 1] = sum(values), len(values)
    of_part = engine.sum_over_dp(sums)
    mean = (of_part[1] / of_part[0].clamp(min=1)).item()
    deviations = float((scores - mean).square().sum())
    squares = engine.sum_over_dp(torch.tensor([deviations], dtype=torch.float64))
    parts = context.all_parts(torch.cat([of_part, squares]))
    if parts is None:
        return {}
    figures = torch.stack(parts)
    n, total, raw, skipped, judged, may_be_early, early, waited_s, *by_name, within = figures.sum(0).tolist()
    if not judged:  # the call has not run
        return {}
    if scored is not None:
        refuse_all_skipped(scored.faults, int(skipped), int(judged), context)
        if config.on_reward_error != "skip" and _only_rewards_judge(config) and not any(by_name[1::2]):
            raise RewardError(
                f"the rewards {', '.join(map(repr, names))} returned None for every sample of iteration "
                f"{context.iteration}, so there is no score."
            )
    mean = total / max(n, 1)
    # The squares about a part's mean, and those of this mean about the whole one.
    means = figures[:, 1] / figures[:, 0].clamp(min=1)
    squares = within + (figures[:, 0] * (means - mean).square()).sum().item()
    metrics = {"reward": mean, "reward_std": (squares / max(n - 1, 1)) ** 0.5}
    if config.on_reward_error == "skip":
        metrics["skipped_samples"] = skipped
    for place, name in enumerate(names):
        if by_name[2 * place + 1]:
            metrics[f"rewards/{name}/mean"] = by_name[2 * place] / by_name[2 * place + 1]
    if config.scoring_role == "reward":
        metrics["rewards/reward_model/mean"] = raw / max(n, 1)
    if may_be_early:
        heads = engine.placement.strategy.dp
        metrics |= {"throughput/rewards_early": early, "throughput/rewards_waited_s": waited_s / heads}
    return metrics


def refuse_all_skipped(faults: Mapping[int, Fault], skipped: int, judged: int, context: CallContext) -> None:
    """Raises RewardError on a head when a reward, or the environment, failed on all samples of the iteration.

    faults   of this head's samples
    skipped  samples of all heads on which a reward failed
    judged   samples of all heads
    """
    if skipped == judged and faults:
        first, config = faults[min(faults)], context.config
        other = ""
        if isinstance(config, Scores) and config.played is not None:
            other = f" or the {'environment' if config.agent is None else 'agent'}"
        raise RewardError(
            f"a reward{other} failed on every sample of iteration "
            f"{context.iteration}, so none is left. Of sample {min(faults)}: {first.reason} "
            f"{SKIPPED_SAMPLES} in the run folder has the others."
        )


def write_skipped(engine: Engine, faults: Mapping[int, Fault], context: CallContext, kind: str = "") -> None:
    """Write one line for each sample of this head that a reward failed on: iteration, sample, row, reward, reason.

    faults  sample id -> its fault
    kind    begins the file's name
    Each iteration and head has a file of its own, renamed into place. If an iteration is computed again, after a kill
    or under another plan, its files replace the earlier ones: no sample is listed twice.
    """
    config = context.config
    if not isinstance(config, Scores) or config.on_reward_error != "skip":
        return
    folder, iteration = context.run_folder / SKIPPED_SAMPLES, f"{kind}{context.iteration:08d}"
    own = engine.coordinate.dp
    for path in folder.glob(f"{iteration}-*.jsonl"):
        dp = int(path.stem.rpartition("-")[2])
        if dp == own or (own == 0 and dp >= engine.placement.strategy.dp):
            path.unlink()
    if not faults:
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{iteration}-{own:04d}.jsonl"
    with open(path.with_suffix(".tmp"), "w", encoding="utf-8", errors="backslashreplace") as file:
        for sample, fault in sorted(faults.items()):
            line = {"iteration": context.iteration, "sample": sample, "row": context.where(sample)}
            file.write(json.dumps(line | fault._asdict(), ensure_ascii=False) + "\n")
    os.replace(path.with_suffix(".tmp"), path)


def write_samples(path: Path, batch: SampleBatch, scored: Scored, count: int) -> None:
    """Write one line for each of the first `count` samples: id, prompt, completion, score (null where the sample has
    left the batch), rewards, reward_model, logged (values that rewards logged for the sample or its batch),
    truncated, columns.

    The file is renamed into place, so that a repeated call leaves the same file as one call. Half of a surrogate
    pair, which UTF-8 cannot encode, is written as a JSON escape.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    answers = scored.answers
    with open(path.with_suffix(".tmp"), "w", encoding="utf-8", errors="backslashreplace") as file:
        for place, sample in enumerate(batch.ids[:count]):
            line = {
                "id": sample,
                "prompt": answers.prompts[place],
                "completion": answers.completions[place],
                "score": float(scored.scores[place]) if scored.stays[place] else None,
                "rewards": {name: values[place] for name, values in scored.rewards.items()},
                "reward_model": None if scored.reward_model is None else float(scored.reward_model[place]),
                "logged": _logged(scored, place),
                "truncated": bool(batch["truncated"].values[place]),
                "columns": {name: values[place] for name, values in answers.columns.items()},
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    os.replace(path.with_suffix(".tmp"), path)


def _logged(scored: Scored, place: int) -> dict[str, Any]:
    """The values that rewards have logged for a sample, or for the batch in which it was judged."""
    n = len(scored.answers)
    return {
        f"{reward}/{name}": value[place] if isinstance(value, list) and len(value) == n else value
        for reward, columns in scored.logged.items()
        for name, value in columns.items()
    }
