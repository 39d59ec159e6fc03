"""`replay`: a train call that an anomaly has left on disk, computed again."""

import math
from pathlib import Path

from prefect_rlhf.flows.view.terminal import tell
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError
from prefect_rlhf.rlhf_tasks.checkpoint.manifest import MANIFEST, CheckpointError
from prefect_rlhf.rlhf_tasks.rank.replay import Replay, StepPair
from prefect_rlhf.rlhf_tasks.user_code.errors import UserCodeError


def replay(dump: Path, /) -> None:
    """Compute a train call again that an anomaly has left on disk, step by step on one device, and compare.

    Parameters
    ----------
    dump
        A folder in anomalies/ of a run folder, of the same version of prefect-rlhf.
    """
    if not (dump / MANIFEST).is_file():
        raise ConfigError(
            f"{dump} is no dump: it has no {MANIFEST}. Name a folder in anomalies/ of a run folder."
        )
    try:
        again = Replay(dump)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    about = again.dump
    strategy = about.record.placement.strategy
    tell(f"{about.anomaly} {about.call} of {about.run}, on {strategy}; torch {about.torch}.")
    try:
        metrics = again.run(lambda pair: tell(line_of(pair, again.tolerance)))
    except UserCodeError as error:
        raise ConfigError(f"{error}. Install the package as it was in the run.") from None
    tell(f"Replayed: {again.anomaly or 'no anomaly.'}")
    places = [(pair.number, pair.place) for pair in again.steps if pair.place]
    if differs := again.difference(metrics):
        tell(f"The first that is not as recorded: {differs}.")
    else:
        tell(f"All values are as recorded, within {again.tolerance:g}.")
    if places:
        tell("The first that is not finite: {1}, in step {0}.".format(*places[0]))


def line_of(pair: StepPair, tolerance: float) -> str:
    """A step in one line: each value once where both are the same bits, else recorded -> replayed."""
    if pair.replayed is None:
        values = "  ".join(f"{name} {value:.6g}" for name, value in pair.recorded.items())
        return f"step {pair.number} (before the dump): {values}"
    parts = []
    for name, now in pair.replayed.items():
        was = pair.recorded.get(name, math.nan)
        is_same = was == now or (math.isnan(was) and math.isnan(now))
        parts.append(f"{name} {now:.6g}" if is_same else f"{name} {was:.9g} -> {now:.9g}")
    off = pair.difference(tolerance)
    return (
        f"step {pair.number}: {'  '.join(parts)}"
        + (f"  DIFFERS: {off}" if off else "")
        + (f"  not finite: {pair.place}" if pair.place else "")
    )
