"""The generate call of the judge: a frozen language model of the run that grades responses by its replies.

What it is asked, and how a score is read in a reply, are those of the reward `builtin:judge`; the reward call reads
the scores (docs/adr/0045-a-judge-of-the-run.md).
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache

import torch

from prefect_rlhf.rlhf_tasks.algorithms.shared.answers import read_answers
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext, CallOutput
from prefect_rlhf.rlhf_tasks.algorithms.shared.generation import generation_metrics
from prefect_rlhf.rlhf_tasks.config.models import JUDGE, JUDGE_REPLIES
from prefect_rlhf.rlhf_tasks.config.responses import RewardConfig
from prefect_rlhf.rlhf_tasks.config.sampling import Scores
from prefect_rlhf.rlhf_tasks.data.tokenizer import Tokenizer
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.generate.generation import generate
from prefect_rlhf.rlhf_tasks.parallel.generate.sampling import SamplingParams
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError, shortened
from prefect_rlhf.rlhf_tasks.user_code.llm_judge import judge


def judge_generate(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """Ask the judge about responses: `judge_replies`, a JSON list of its replies to each.

    A reply depends only on (seed, iteration, sample id, question, the judge's weights), not on the layout. A question
    that leaves no room for a reply in the judge's context has null. A sample that the reward does not judge (`only`)
    has none.
    Metrics, of all parts of the call: judge/completions/mean_length and judge/completions/clipped_ratio of the
    replies, judge/throughput/tokens_per_s, and judge/unreadable, the share of replies without a score.
    Raises RewardError where no reply of the iteration has one; after the first iteration not where such replies have
    a score, or samples without one are skipped.
    """
    config = context.config
    assert isinstance(config, Scores)
    reward = config.judged_by_a_role
    assert reward is not None, "the graph has no judge without its reward"
    asks, tokenizer = judge(**reward.kwargs), _tokenizer(config.roles()[JUDGE].folder)
    began_s = time.perf_counter()
    questions = _questions(batch, context, reward, asks, tokenizer)
    drawn = generate(
        engine,
        _fitting(questions, engine, asks),
        SamplingParams(asks.max_tokens, asks.temperature, stop_ids=tokenizer.stop_ids),
        config.seed,
        context.iteration,
        JUDGE,
        micro_batches=context.micro_batches,
    )
    mine, output, unread = torch.zeros(6, dtype=torch.float64), None, list[str]()
    if drawn is not None:
        texts = _replies(drawn, tokenizer)
        unread = [text for text in texts.values() if not asks.reads(text)]
        output = _by_sample(batch, {number: texts.get(number) for number in questions}, asks)
        tokens, clipped = drawn["response_mask"].values.sum(), drawn["truncated"].values.sum()
        seconds = time.perf_counter() - began_s
        mine = torch.tensor([len(drawn), tokens, clipped, seconds, 1, len(unread)], dtype=torch.float64)
    metrics = generation_metrics(context.all_parts(engine.sum_over_dp(mine)), ["unreadable"])
    may_be = reward.kwargs.get("unreadable") is not None or config.on_reward_error == "skip"
    if unread and metrics.get("unreadable") == 1 and not (may_be and context.iteration):
        raise RewardError(
            f"no reply of models.judge in iteration {context.iteration} has a score; one ends with "
            f"{shortened(repr(unread[-1][-120:]), 150)}. Correct pattern or template of builtin:judge, or choose "
            "another judge."
        )
    return CallOutput(output, {f"judge/{name}": value for name, value in metrics.items()})


def _questions(
    batch: SampleBatch, context: CallContext, reward: RewardConfig, asks: judge, tokenizer: Tokenizer
) -> dict[int, list[int]]:
    """Number of a question -> its tokens, as the judge reads them: question k about a sample is sample * asks + k."""
    answers = read_answers(batch, context)
    texts: dict[int, str] = {}
    for place, sample in enumerate(batch.ids):
        row = {name: values[place] for name, values in answers.columns.items()}
        if all(row.get(name) in values for name, values in reward.only.items()):
            with suppress(RewardError):  # about this row: the reward call raises it
                every = asks.questions(answers.prompts[place], answers.completions[place], row)
                texts |= {sample * asks.asks + number: text for number, text in enumerate(every)}
    return dict(zip(texts, tokenizer.turns(list(texts.values())), strict=True))


def _fitting(questions: Mapping[int, Sequence[int]], engine: Engine, asks: judge) -> SampleBatch:
    """The questions that leave room for a reply in the judge's context, by their numbers, as prompts."""
    room = engine.layout.shape.context - asks.max_tokens
    fitting = {number: ids for number, ids in questions.items() if len(ids) <= room}
    ids = torch.tensor([each for ids in fitting.values() for each in ids], dtype=torch.int64)
    prompts = Packed(ids.to(engine.device), tuple(map(len, fitting.values())))
    return SampleBatch(tuple(fitting), {"prompt_ids": prompts})


def _replies(drawn: SampleBatch, tokenizer: Tokenizer) -> dict[int, str]:
    """Number of a question -> the text of its reply."""
    pairs = zip(drawn["input_ids"].split(), drawn["response_mask"].split(), strict=True)
    texts = [tokenizer.decode(ids[mask].tolist()) for ids, mask in pairs]
    return dict(zip(drawn.ids, texts, strict=True))


def _by_sample(batch: SampleBatch, replies: Mapping[int, str | None], asks: judge) -> SampleBatch:
    """The replies to the questions about each sample, as JSON."""
    of_sample: dict[int, list[str | None]] = {sample: [] for sample in batch.ids}
    for number, reply in replies.items():
        of_sample[number // asks.asks].append(reply)
    texts = [json.dumps(each).encode() for each in of_sample.values()]
    values = torch.tensor(list(b"".join(texts)), dtype=torch.uint8, device=batch["input_ids"].values.device)
    return SampleBatch(batch.ids, {JUDGE_REPLIES: Packed(values, tuple(map(len, texts)))})


@lru_cache(maxsize=1)
def _tokenizer(folder: str) -> Tokenizer:
    return Tokenizer.from_folder(folder)
