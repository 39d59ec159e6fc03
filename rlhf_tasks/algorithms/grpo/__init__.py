"""Group-relative policy optimisation."""

from collections.abc import Sequence
from typing import Protocol

from rlhf_tasks.algorithms.grpo.config import GRPOConfig
from rlhf_tasks.algorithms.registry import Algorithm
from rlhf_tasks.algorithms.shared.graphs.program import Handle, Models, learned, rollout, traced
from rlhf_tasks.algorithms.shared.graphs.rollout_calls import PROMPT_KEYS, STAYS, PolicySizes
from rlhf_tasks.data.rows import PromptExample, prompt_example
from rlhf_tasks.spec import ModelFunctionCall


class GRPOSizes(PolicySizes, Protocol):
    """The fields of a GRPO configuration that the graph depends on."""

    @property
    def max_rounds(self) -> int: ...


@traced(PROMPT_KEYS)
def one_round(models: Models, prompts: Handle, config: PolicySizes) -> None:
    """actor generate; reward inference, and ref inference where beta > 0; actor train_step.

    A sequence's advantage is its score relative to its group (arXiv:2402.03300, section 4.1), so there is no critic.
    """
    models.actor.train(rollout(models, prompts, config).select(*learned(config)))


def graph(config: GRPOSizes) -> list[ModelFunctionCall]:
    """The calls of one round, or of several."""
    return in_rounds(one_round(config), config.max_rounds)


def in_rounds(calls: Sequence[ModelFunctionCall], rounds: int) -> list[ModelFunctionCall]:
    """The calls of an iteration that samples in rounds: each round is a part of generation and scoring.

    Generation reads the scores of the rounds before, since a round may not be needed. The train_step, the last call,
    gets the samples of all rounds.
    """
    if rounds == 1:
        return list(calls)
    *sampling, train = calls
    generate, *scoring = (
        call.model_copy(update={"n_seqs": rounds * call.n_seqs, "chunks": rounds}) for call in sampling
    )
    made = [key for call in scoring for key in call.outputs]
    first = generate.model_copy(update={"earlier": tuple(key for key in ("scores", STAYS) if key in made)})
    return [first, *scoring, train.model_copy(update={"rounds": rounds})]


ALGORITHM = Algorithm(
    config=GRPOConfig,
    graph=graph,
    dataset_keys=PROMPT_KEYS,
    read_row=prompt_example,
    fetch=PromptExample.values,
    functions="rlhf_tasks.algorithms.grpo.functions",
)
