"""How an environment changes a graph: generation reads rows and is rewarded. Torch-free."""

from collections.abc import Sequence

from rlhf_tasks.spec import ModelFunctionCall
from rlhf_tasks.system.reading import ConfigError

ENVIRONMENT_REWARDS = "environment_rewards"
"""The key of the sum of an environment's rewards of a sample."""

ENVIRONMENT_FAULT = "environment_fault"
"""The key of the sentence that says how the environment failed on a sample, where such are skipped; mostly empty."""


def with_environment(calls: Sequence[ModelFunctionCall], skips: bool) -> list[ModelFunctionCall]:
    """The calls of a graph whose `actor_generate` an environment answers.

    It also reads `columns`, the rows, and gives ENVIRONMENT_REWARDS, which the call that gives `scores` reads.
    skips  whether samples on which the environment fails are skipped: then ENVIRONMENT_FAULT goes the same way

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
    keys = (ENVIRONMENT_REWARDS, ENVIRONMENT_FAULT) if skips else (ENVIRONMENT_REWARDS,)
    found = []
    for call in calls:
        if call.name == "actor_generate":
            inputs, outputs = (*call.inputs, "columns"), (*call.outputs, *keys)
            call = call.model_copy(update={"inputs": inputs, "outputs": outputs})
        elif call.name in scoring:
            call = call.model_copy(update={"inputs": (*call.inputs, *keys)})
        found.append(call)
    return found
