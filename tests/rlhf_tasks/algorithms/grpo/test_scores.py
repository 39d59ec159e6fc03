"""What GRPO makes of scores before they are compared."""

import torch

from prefect_rlhf.rlhf_tasks.algorithms.grpo.functions import overlong_penalties


def test_the_penalty_of_long_responses_grows_over_the_buffer():
    """DAPO's example: 20,480 tokens at most, of which the last 4,096 are the buffer."""
    tokens = torch.tensor([100, 16384, 16384 + 1024, 20480])
    assert overlong_penalties(tokens, 20480, 0.2).tolist() == [0.0, 0.0, -0.25, -1.0]
    assert overlong_penalties(torch.tensor([0, 5, 10]), 10, 1.0).tolist() == [0.0, -0.5, -1.0]
