"""Profiles that CPU slots would show to who measures them, were they as their figures say."""

from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.pricing.analytic import computed_profile
from prefect_rlhf.planner.pricing.devices import preset
from prefect_rlhf.planner.pricing.figures import MeasuredProfile
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from prefect_rlhf.rlhf_tasks.profiling.measurements import Grid

ALL_FOR_TENSORS = {"context_bytes": 0, "communicator_bytes": 0, "fragmentation": 0.0}
"""Figures of a device that keeps nothing of its memory."""


def as_measured(shape: ModelShape, cluster: Cluster, slower: float = 1.0) -> MeasuredProfile:
    """A profile of slots so many times slower than by their figures, for 64 sequences of 32 + 32 tokens."""
    profile = computed_profile(preset("cpu-slot"), cluster, shape, Grid.around(64, 32, 64, 128), 4)
    operations, exchanges = (
        tuple(one.model_copy(update={"seconds": slower * one.seconds}) for one in timed)
        for timed in (profile.operations, profile.exchanges)
    )
    figures = {"operations": operations, "exchanges": exchanges, "dispatch_s": 0.0, "process_bytes": 10**8}
    return profile.model_copy(update={**figures, "computed_from": None})
