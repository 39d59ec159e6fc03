"""Messages between flow, controller and ranks: what goes out as JSON comes in as it was."""

import math

import pytest

from prefect_rlhf.rlhf_tasks.protocol.messages import EVENT, NEWS, Committed, Done
from prefect_rlhf.rlhf_tasks.spec import NodeKey, NodeResult

METRICS = {"loss/policy": math.nan, "grad_norm/actor": math.inf, "kl": -math.inf, "reward": 0.1}


@pytest.mark.parametrize("kind", ["news", "event"])
def test_metrics_that_are_not_finite_arrive(kind: str):
    """A skipped optimizer step reports them; a message that cannot be read would end the link."""
    key = NodeKey(run="r", attempt=1, generation=0, iteration=3, node="actor_train")
    sent = NodeResult(key=key, rank=1, started_s=1.0, ended_s=2.0, metrics=METRICS)
    if kind == "news":
        received = NEWS.validate_json(Done(result=sent).model_dump_json()).result
    else:
        message = Committed(iteration=3, results={"actor_train": (sent,)})
        (received,) = EVENT.validate_json(message.model_dump_json()).results["actor_train"]
    assert math.isnan(received.metrics["loss/policy"])
    assert {**received.metrics, "loss/policy": 0} == {**METRICS, "loss/policy": 0}
