"""What an environment answers, as the tokens that the policy reads next, within the configuration's bounds."""

from typing import Any

from rlhf_tasks.config.base import Scores
from rlhf_tasks.data.chat_template import TokenizerError
from rlhf_tasks.data.observations import Observations
from rlhf_tasks.rewards.forms import RewardError


def observed(observations: Observations, config: Scores, text: str, prompt: Any, last: int) -> list[int]:
    """The token ids of an observation.

    prompt, last  see `Observations.ids`
    Raises RewardError where the tokenizer or the chat template cannot write it, and where it has too many tokens.
    """
    environment = config.environment
    assert environment is not None, "the run has no environment"
    try:
        ids = observations.ids(text, prompt, last)
    except TokenizerError as error:
        raise RewardError(f"environment {environment.factory}: {error}") from None
    most = environment.max_observation_tokens or config.sampling.max_completion_length
    if len(ids) > most:
        raise RewardError(
            f"environment {environment.factory}: an observation has {len(ids)} tokens, but {most} are allowed. "
            "Shorten it, or raise environment.max_observation_tokens or sampling.max_completion_length."
        )
    return ids
