"""The weights of tokens that another policy has drawn are those of TRL's and verl's own code, as `bench.corrections`
has recorded them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from prefect_rlhf.rlhf_tasks.algorithms.shared.configs import Correction
from prefect_rlhf.rlhf_tasks.algorithms.shared.policy import behaviour_weights
from prefect_rlhf.rlhf_tasks.algorithms.shared.policy import token_ratio as unread

RECORD = json.loads(Path(__file__).with_name("corrections_of_others.json").read_text())
KINDS = {"truncate": "truncated", "mask": "masked"}


@pytest.mark.parametrize("way", RECORD["weights"])
def test_weights_are_those_of_others(way: str):
    of, mode = way.split()
    level, kind = mode.split("_")
    lower, upper = RECORD["bounds"]
    if of == "verl" and kind == "truncate":
        lower = None  # it has none there
    settings: Any = {"kind": KINDS[kind], "level": level, "lower": lower, "upper": upper}
    change = torch.tensor(RECORD["change"], dtype=torch.float64)
    mask, lengths = torch.ones(len(change), dtype=torch.bool), RECORD["lengths"]
    ours, cut = behaviour_weights(change, mask, lengths, Correction(**settings), unread)
    theirs = torch.tensor(RECORD["weights"][way], dtype=torch.float64)
    assert 0 < cut.sum() < len(cut), "the batch has tokens within and outside the bounds"
    assert not ours.requires_grad, "weights are constants of the loss"
    if (of, level) == ("verl", "geometric"):  # it masks by the mean, and weights by another ratio
        ours = (ours > 0).double()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
