"""Samples in the form that rewards take: of a batch in the reward call, or of each as soon as it has ended."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext
from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import AGENT_COLUMNS, TOOL_CALLS
from prefect_rlhf.rlhf_tasks.config.models import JUDGE_REPLIES
from prefect_rlhf.rlhf_tasks.config.sampling import Scores
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.user_code.forms import Answers
from prefect_rlhf.rlhf_tasks.user_code.tools.episode import CALL_COLUMNS


def asking_early(batch: SampleBatch, context: CallContext) -> Callable[[int, Sequence[int]], None] | None:
    """What a head calls with each sample that has ended, and what was drawn of it, so that rewards are asked for it
    while others are drawn (docs/adr/0041-rewards-asked-early.md). None where another rank scores them, or where the
    judge replies before.

    batch  with `prompt_ids`, of samples that are drawn at once
    """
    config, mine = context.config, [sample for sample in batch.ids if sample in context.scored_here]
    if not mine or not isinstance(config, Scores) or not config.scoring_rewards or config.judged_by_a_role:
        return None
    assert context.rows is not None, "a sample that is scored has a row"
    columns = context.rows(mine).reorder(mine)["columns"].split()
    prompts = batch["prompt_ids"].to(torch.device("cpu")).split()
    of_sample = dict(zip(mine, columns, strict=True))
    prompt_of = dict(zip(batch.ids, prompts, strict=True))

    def on_ended(sample: int, drawn: Sequence[int]) -> None:
        if sample not in of_sample:
            return
        prompt = prompt_of[sample]
        ids = torch.cat([prompt, torch.tensor(drawn, dtype=torch.int64)])
        data = {
            "input_ids": ids,
            "response_mask": torch.arange(len(ids)) >= len(prompt),
            "columns": of_sample[sample],
        }
        ended = SampleBatch((sample,), {key: Packed.of([value]) for key, value in data.items()})
        numbers = [context.scored_here[sample]]
        context.rewards.ask_early(read_answers(ended, context), numbers, context.iteration)

    return on_ended


def read_answers(batch: SampleBatch, context: CallContext) -> Answers:
    """The prompts, responses and columns of a batch, in the form that rewards take.

    Of a response of several turns, rewards get what the policy drew, without the environment's answers. With tools
    they get the last turn, and as columns how often tools were called: `tool_calls`, `malformed_calls`,
    `failed_calls`. What a judge has replied is the column `judge_replies`. The fields of a rollout_func are columns,
    too, in place of those of the rows with their names.
    """
    responses = [
        ids[mask].tolist()
        for ids, mask in zip(batch["input_ids"].split(), batch["response_mask"].split(), strict=True)
    ]
    read = [
        context.tokenizer.decode(ids[: int(mask.int().argmax())].tolist(), special_tokens=True)
        for ids, mask in zip(batch["input_ids"].split(), batch["response_mask"].split(), strict=True)
    ]
    has_tools = TOOL_CALLS in batch.data
    judged = _last_turns(batch) if has_tools else responses
    texts = [context.tokenizer.decode(ids) for ids in judged]
    answers = Answers.of_columns(batch["columns"].texts(), texts, responses, read, context.columns())
    columns = answers.columns
    if JUDGE_REPLIES in batch.data:
        columns = {
            **columns,
            JUDGE_REPLIES: [json.loads(replies) for replies in batch[JUDGE_REPLIES].texts()],
        }
    if has_tools:
        counts = torch.stack(batch[TOOL_CALLS].split()).T.tolist() if len(batch) else [[]] * len(CALL_COLUMNS)
        columns = {**columns, **dict(zip(CALL_COLUMNS, counts, strict=True))}
    if AGENT_COLUMNS in batch.data:
        of_agents = [json.loads(text) for text in batch[AGENT_COLUMNS].texts()]
        for name in dict.fromkeys(name for fields in of_agents for name in fields):
            before = columns.get(name, [None] * len(batch))
            stated = zip(of_agents, before, strict=True)
            columns = {**columns, name: [fields.get(name, other) for fields, other in stated]}
    return replace(answers, columns=columns)


def _last_turns(batch: SampleBatch) -> list[list[int]]:
    """The tokens that were drawn last of each sample: those after the last one that it has read."""
    pairs = zip(batch["input_ids"].split(), batch["response_mask"].split(), strict=True)
    return [ids[int((~mask).nonzero()[-1]) + 1 :].tolist() for ids, mask in pairs]
