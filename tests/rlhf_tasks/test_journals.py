"""The journals are JSON for every reader, whatever a step computed."""

import json
import math

from rlhf_tasks.journals import metrics_line
from rlhf_tasks.spec import NodeKey, NodeResult


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def test_values_that_are_not_finite_stand_as_null():
    key = NodeKey(run="r", attempt=1, generation=0, iteration=3, node="actor_train")
    metrics = {"loss/policy": math.nan, "grad_norm/actor": math.inf, "kl": -math.inf, "reward": 0.5}
    result = NodeResult(key=key, rank=0, started_s=1.0, ended_s=2.5, metrics=metrics)
    line = json.loads(metrics_line(3, {"actor_train": {0: result}}), parse_constant=_refuse)
    nothing = dict.fromkeys(("loss/policy", "grad_norm/actor", "kl"))
    assert line == {"iteration": 3, "reward": 0.5, "time/actor_train": 1.5, **nothing}
