"""The threads of a process that computes with torch."""

import os
import re

import torch


def take_stated_threads() -> None:
    """Give torch as many threads as the environment states now.

    torch reads the environment when it is loaded. In a fork, a fork server has loaded it, perhaps for other ranks.
    """
    stated = [re.match(r"\d+", os.environ.get(name, "")) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")]
    if numbers := [int(number[0]) for number in stated if number]:
        torch.set_num_threads(min(numbers))
