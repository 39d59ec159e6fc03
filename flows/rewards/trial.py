"""Calls each reward of a configuration once, on a row of its data, in a process like that of a run."""

import asyncio
import time
from collections.abc import Iterator
from typing import NamedTuple

from flows.rewards.find import blocks_named
from rlhf_tasks.algorithms.examples import first_example
from rlhf_tasks.config.base import Scores
from rlhf_tasks.data.rows import prompt_example
from rlhf_tasks.data.tokenizer import Tokenizer
from rlhf_tasks.rewards.forms import Answers, RewardError, total
from rlhf_tasks.rewards.process import RewardProcess

COMPLETION_TOKENS = 16


class Tried(NamedTuple):
    """The result of one reward.

    value  of the whole answer; None where the reward gave no verdict or failed
    where  the row that it judged
    fault  "" where it did not fail
    """

    name: str
    value: float | None
    seconds: float
    where: str
    fault: str


def try_rewards(config: Scores) -> Iterator[Tried]:
    """Call the rewards one after another. The completion that they judge is the end of the row's own prompt.

    Raises ConfigError for a Prefect block that does not exist, or where no server is configured.
    """
    blocks = {}
    if blocks_named(config.rewards):  # only then: Prefect takes seconds to import
        from flows.rewards.secret_blocks import secret_blocks

        blocks = asyncio.run(secret_blocks(config))
    answers, where = _answers(config)
    for reward in config.rewards:
        tried = config.model_copy(update={"rewards": (reward,), "on_reward_error": "stop"})
        alone = RewardProcess(tried, blocks=blocks)
        started_s = time.monotonic()
        value, fault = None, ""
        try:
            (given,) = alone.submit(answers).result().values[reward.name]
            value = None if given is None else total(given)
        except RewardError as error:
            fault = str(error)
        finally:
            alone.close()
        yield Tried(reward.name, value, time.monotonic() - started_s, where, fault)


def _answers(config: Scores) -> tuple[Answers, str]:
    tokenizer = Tokenizer.from_folder(config.models.tokenizer)
    placed, example = first_example(config, prompt_example, tokenizer)
    ids = example.prompt_ids[-COMPLETION_TOKENS:]
    read = [tokenizer.decode(example.prompt_ids, special_tokens=True)]
    return Answers.of_columns([example.columns], [tokenizer.decode(ids)], [ids], read), placed.where
