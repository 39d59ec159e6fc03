"""The rewards of a batch at its tokens."""

from torch import Tensor

from rlhf_tasks.algorithms.shared.graphs.rollout_calls import TOKEN_REWARDS
from rlhf_tasks.algorithms.shared.learning.policy_math import at_last_tokens
from rlhf_tasks.parallel.batch.samples import SampleBatch


def token_rewards(batch: SampleBatch) -> Tensor:
    """The reward of each token: [T], 0 outside responses. What is judged as a whole counts at the last token."""
    if TOKEN_REWARDS in batch.data:
        return batch[TOKEN_REWARDS].values
    return at_last_tokens(batch["scores"].values, batch["response_mask"].values, batch["input_ids"].lengths)
