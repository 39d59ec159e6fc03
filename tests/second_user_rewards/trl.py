"""Rewards in the forms that TRL documents: called with keywords, a list of values comes back."""

import asyncio


def exact(completions, ground_truth, **kwargs):
    """No prompts, one column."""
    return [float(truth in completion) for completion, truth in zip(completions, ground_truth, strict=True)]


def length(completions, **kwargs):
    """Completions only."""
    return [min(len(completion), 20) / 20 for completion in completions]


def token_count(completions_ids, **kwargs):
    """Token ids only."""
    return [len(ids) / 8 for ids in completions_ids]


def with_prompts(prompts, completions, **kwargs):
    return [float(len(prompt) > 0) for prompt, _ in zip(prompts, completions, strict=True)]


def everything(**kwargs):
    return [0.5 for _ in kwargs["completions"]]


def for_sums(prompts, completions, task, **kwargs):
    """One task of several: no opinion on the others."""
    return [1.0 if kind == "add" else None for kind in task]


async def slow(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 if completion else 0.0 for completion in completions]


def by_progress(completions, trainer_state, **kwargs):
    """Changes while the training continues."""
    return [trainer_state.global_step / trainer_state.max_steps for _ in completions]


def logging(completions, log_extra=None, log_metric=None, **kwargs):
    """Tells what it saw."""
    lengths = [len(completion) for completion in completions]
    if log_extra:
        log_extra("length", lengths)
    if log_metric:
        log_metric("mean_length", sum(lengths) / len(lengths))
    return [float(n > 0) for n in lengths]


def chat_format(completions, **kwargs):
    """Conversations: a completion is a list of one message."""
    return [float(completion[0]["role"] == "assistant") for completion in completions]


class Threshold:
    """A reward that is made once and called for each batch."""

    def __init__(self, most=20):
        self.most = most
        self.__name__ = "threshold"

    def __call__(self, completions, **kwargs):
        return [float(len(completion) <= self.most) for completion in completions]


class AsyncThreshold(Threshold):
    async def __call__(self, completions, **kwargs):
        await asyncio.sleep(0)
        return [float(len(completion) <= self.most) for completion in completions]


made = Threshold(most=5)
