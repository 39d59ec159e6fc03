"""Calls each reward and the environment of a configuration once, on a row of its data, in a process like a run's."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import NamedTuple

from flows.rewards.find import blocks_named
from rlhf_tasks.algorithms.examples import first_example
from rlhf_tasks.config.base import Scores
from rlhf_tasks.data.observations import Observations
from rlhf_tasks.data.rows import prompt_example
from rlhf_tasks.data.tokenizer import Tokenizer
from rlhf_tasks.user_code.environments import EnvironmentProcess, observed
from rlhf_tasks.user_code.episodes import Answer, Episode, shown
from rlhf_tasks.user_code.errors import RewardError
from rlhf_tasks.user_code.forms import Answers, total
from rlhf_tasks.user_code.rewards import RewardProcess

COMPLETION_TOKENS = 16


class Tried(NamedTuple):
    """The result of a reward or an environment.

    name   with what it is, for sentences
    gave   in words
    where  the row that it was given
    fault  "" where it did not fail
    """

    name: str
    gave: str
    seconds: float
    where: str
    fault: str


def try_rewards(config: Scores) -> Iterator[Tried]:
    """Call the rewards one after another. The completion that they judge is the end of the row's own prompt.

    Raises ConfigError for a Prefect block that does not exist, or where no server is configured.
    """
    blocks = _blocks(config)
    answers, where = _answers(config)
    for reward in config.scoring_rewards:
        tried = config.model_copy(update={"rewards": (reward,), "on_reward_error": "stop"})
        alone = RewardProcess(tried, blocks=blocks)
        started_s = time.monotonic()
        gave, fault = "no verdict", ""
        try:
            (given,) = alone.submit(answers).result().values[reward.name]
            if given is not None:
                gave = f"{total(given):g}"
        except RewardError as error:
            fault = str(error)
        finally:
            alone.close()
        yield Tried(f"reward {reward.name}", gave, time.monotonic() - started_s, where, fault)


def try_environment(config: Scores) -> Iterator[Tried]:
    """Answer one turn, where the run has an environment. The turn is the end of the row's own prompt."""
    if config.environment is None:
        return
    tokenizer = Tokenizer.from_folder(config.models.tokenizer)
    placed, example = first_example(config, prompt_example, tokenizer)
    ids, row = example.prompt_ids[-COMPLETION_TOKENS:], json.loads(example.columns)
    process = EnvironmentProcess(config.model_copy(update={"on_reward_error": "stop"}), _blocks(config))
    started_s = time.monotonic()
    gave, fault = "", ""
    try:
        (answer,) = process.answers([Episode(0, row, config.seed, [tokenizer.decode(ids)])])
        assert isinstance(answer, Answer), "failures are raised"
        gave = f"reward {answer.reward:g}, over"
        if not answer.done:
            observed(Observations(tokenizer), config, answer.observation, row.get("prompt"), ids[-1])
            gave = f"reward {answer.reward:g}, {shown(answer.observation)}"
    except RewardError as error:
        fault = str(error)
    finally:
        process.close()
    name = f"environment {config.environment.name}"
    yield Tried(name, gave, time.monotonic() - started_s, placed.where, fault)


def _blocks(config: Scores) -> dict[str, str]:
    if not blocks_named(config):  # Prefect takes seconds to import
        return {}
    from flows.rewards.secret_blocks import secret_blocks

    return asyncio.run(secret_blocks(config))


def _answers(config: Scores) -> tuple[Answers, str]:
    tokenizer = Tokenizer.from_folder(config.models.tokenizer)
    placed, example = first_example(config, prompt_example, tokenizer)
    ids = example.prompt_ids[-COMPLETION_TOKENS:]
    read = [tokenizer.decode(example.prompt_ids, special_tokens=True)]
    return Answers.of_columns([example.columns], [tokenizer.decode(ids)], [ids], read), placed.where
