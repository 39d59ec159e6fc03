"""What a train call does where its losses, its KL divergence or its rewards are not as they should be: `on_anomaly`
(docs/adr/0036-anomalies.md).

All ranks of the call's mesh decide alike, since they decide by numbers that are reduced over the mesh anyway, and by
the role's state, which is in every commit: a run that is resumed decides the same again.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.algorithms.shared.configs import PolicyConfig
from prefect_rlhf.rlhf_tasks.config.training import TrainingConfig
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from prefect_rlhf.rlhf_tasks.user_code.errors import UserCodeError

if TYPE_CHECKING:
    from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext

EQUAL_STATE = "equal_rewards"
"""Key in `engine.state`: iterations in a row whose rewards were all equal, while that is not 0."""


class AnomalyError(UserCodeError):
    """An anomaly that ends the run: a retry would meet it again, and no rank is at fault."""


class Record:
    """What is kept of a train call for the case of an anomaly. This one keeps nothing."""

    def stepped(self, report: Mapping[str, float]) -> None:
        """A step of the call has been taken, or left out, with this report."""

    def dump(self, anomaly: str) -> Path | None:
        """Write down the call before it continues. Collective over the mesh. Returns the folder; None: nothing is."""
        return None


@contextmanager
def guarded(engine: Engine, role: str, context: "CallContext") -> Iterator[None]:
    """Inside, a train step whose loss or gradient is not finite is an anomaly. No rank has applied it."""
    number = 0

    def watch(report: Mapping[str, float]) -> None:
        nonlocal number
        before(report)
        context.record.stepped(report)
        if report["skipped"]:
            loss, norm = report["loss"], report["grad_norm"]
            _leaves_out(
                context,
                f"{role}: optimizer step {number} has loss {loss:g} and gradient norm {norm:g}.",
                "Correct data or rewards, lower the learning rate, or resume with on_anomaly=skip.",
            )
        number += 1

    before, engine.watch = engine.watch, watch
    try:
        yield
    finally:
        engine.watch = before


def leaves_out_update(
    engine: Engine, context: "CallContext", kl: float | None, equal: bool, which: str = "rewards"
) -> tuple[bool, dict[str, float]]:
    """Whether a policy's train call takes no step, and the metrics anomaly/kl and anomaly/equal_rewards: 1 where that
    is an anomaly, else 0; each only where the configuration has its bound.

    kl     mean KL divergence from the reference per sequence, in nats; None without a reference
    equal  whether all rewards that the algorithm compares are equal; which: these rewards, in words
    Both are the same on all ranks. Raises AnomalyError where an anomaly stops the run.
    """
    config = context.config
    assert isinstance(config, PolicyConfig), f"{config.type} runs have no policy"
    metrics, anomalies, remedies = dict[str, float](), list[str](), list[str]()
    if config.kl_bound is not None and kl is not None:
        above = not kl <= config.kl_bound  # so is what is not a number
        metrics["anomaly/kl"] = float(above)
        if above:
            anomalies.append(
                f"the KL divergence from the reference is {kl:g} nats a sequence, above kl_bound={config.kl_bound:g}."
            )
            remedies.append(
                "Raise kl_bound or the factor of the KL divergence, or resume with on_anomaly=warn."
            )
    if (most := config.equal_rewards_iterations) is not None:
        before = engine.state.pop(EQUAL_STATE, 0)
        in_a_row = before + 1 if equal else 0
        if equal:
            engine.state[EQUAL_STATE] = in_a_row
        metrics["anomaly/equal_rewards"] = float(in_a_row >= most)
        if in_a_row >= most:
            anomalies.append(f"all {which} are equal in {in_a_row} iterations in a row.")
            remedies.append("Correct data or rewards, or resume with on_anomaly=warn.")
    return bool(anomalies) and _leaves_out(context, " ".join(anomalies), " ".join(remedies)), metrics


def extremes(engine: Engine, scores: Tensor) -> Tensor:
    """[3 dp] float64, for `Engine.sum_over_dp`: this replica's number of scores, the lowest and the highest, at its
    own places; 0 elsewhere. scores  [n]"""
    places = torch.zeros(engine.placement.strategy.dp, 3, dtype=torch.float64, device=scores.device)
    if len(scores):
        of_replica = places[engine.coordinate.dp]
        of_replica[0], of_replica[1], of_replica[2] = len(scores), scores.min(), scores.max()
    return places.view(-1)


def are_equal(summed: list[float]) -> bool:
    """Whether all scores of all replicas are equal, by the sum of their `extremes`."""
    ends = {end for n, *both in zip(*[iter(summed)] * 3, strict=True) if n for end in both}
    return len(ends) == 1 and math.isfinite(*ends)


def _leaves_out(context: "CallContext", what: str, remedy: str) -> bool:
    """Whether an anomaly leaves out its update. Raises AnomalyError where it stops the run."""
    config = context.config
    assert isinstance(config, TrainingConfig), f"{config.type} runs do not train"
    anomaly = f"iteration {context.iteration}: {what}"
    folder = context.record.dump(anomaly)
    if config.on_anomaly == "stop":
        replay = "" if folder is None else f" To compute the call again: prefect-rlhf replay {folder}"
        raise AnomalyError(f"{anomaly} on_anomaly=stop ends the run at its last commit. {remedy}{replay}")
    return config.on_anomaly == "skip"
