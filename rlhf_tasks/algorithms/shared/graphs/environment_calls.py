"""How an environment changes a graph: generation reads rows and is rewarded. Torch-free."""

from collections.abc import Sequence

from rlhf_tasks.spec import ModelFunctionCall
from rlhf_tasks.system.reading import ConfigError

ENVIRONMENT_REWARDS = "environment_rewards"
"""The key of the sum of an environment's rewards of a sample."""


def with_environment(calls: Sequence[ModelFunctionCall]) -> list[ModelFunctionCall]:
    """The calls of a graph whose `actor_generate` an environment answers.

    It also reads `columns`, the rows, and gives ENVIRONMENT_REWARDS, which the call that gives `scores` reads.

    Raises ConfigError where the graph draws responses in another call too, or has no scores.
    """
    others = [call.name for call in calls if call.kind == "generate" and call.name != "actor_generate"]
    if others:
        raise ConfigError(
            f"environment: this algorithm also draws responses in {others[0]!r}, which no environment answers. Leave "
            "it out, or choose another algorithm, such as grpo."
        )
    scoring = [call.name for call in calls if "scores" in call.outputs]
    if not scoring:
        raise ConfigError("environment: no call of this algorithm gives scores. Leave it out.")
    found = []
    for call in calls:
        if call.name == "actor_generate":
            inputs, outputs = (*call.inputs, "columns"), (*call.outputs, ENVIRONMENT_REWARDS)
            call = call.model_copy(update={"inputs": inputs, "outputs": outputs})
        elif call.name in scoring:
            call = call.model_copy(update={"inputs": (*call.inputs, ENVIRONMENT_REWARDS)})
        found.append(call)
    return found
