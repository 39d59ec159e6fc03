"""A loop that decides from which rows it draws, when it is evaluated, and when it ends. Import as
`tests.tiny_curriculum`."""

from collections.abc import Mapping
from typing import Literal

from prefect_rlhf.deployments.examples import own_loop
from prefect_rlhf.rlhf_tasks.algorithms.ppo import PPOConfig
from prefect_rlhf.rlhf_tasks.algorithms.registry import Algorithm
from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import PROMPT_KEYS, SEQUENCES, Handle, Models, traced
from prefect_rlhf.rlhf_tasks.data.rows import PromptExample, prompt_example

NAME = "tests.tiny_curriculum"
SHARES = (0.25, 0.5, 1.0)
"""Of the rows, in the first iterations."""


class CurriculumConfig(PPOConfig):
    type: Literal["tests.tiny_curriculum"] = NAME  # pyright: ignore[reportIncompatibleVariableOverride]


def more_rows(before: float, metrics: Mapping[str, float]) -> float:
    """Twice as many as before, up to all."""
    return min(1.0, 2 * before) if metrics["kl"] == metrics["kl"] else before


def at_half(before: float, metrics: Mapping[str, float]) -> float:
    """1 in every second iteration, from the second on."""
    return 1.0 - before


@traced(PROMPT_KEYS)
def loop(models: Models, prompts: Handle, config: CurriculumConfig) -> None:
    batch = models.actor.generate(prompts.repeat(config.group_size))
    batch |= models.ref.logprobs(batch)
    batch |= models.critic.inference(batch.select(*SEQUENCES), ("values",))
    batch |= models.reward.score(batch)
    seen = (*SEQUENCES, "old_logprobs", "ref_logprobs", "values", "scores")
    estimated = models.critic.compute(batch.select(*seen), ("advantages", "returns"), name="advantages")
    estimated.decide("rows", more_rows, first=SHARES[0])
    estimated.decide("evaluate", at_half, first=1.0)
    batch |= estimated
    models.actor.train(batch.select(*SEQUENCES, "old_logprobs", "advantages"))
    models.critic.train(batch.select(*SEQUENCES, "values", "returns"))


ALGORITHM = Algorithm(
    config=CurriculumConfig,
    graph=loop,
    dataset_keys=PROMPT_KEYS,
    read_row=prompt_example,
    fetch=PromptExample.values,
    functions=f"{own_loop.NAME}_functions",
)
