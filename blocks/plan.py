"""An execution plan as a Prefect block."""

from prefect.blocks.core import Block
from pydantic import Field

from prefect_rlhf.rlhf_tasks.config.cluster import ManualAssignments


class StoredPlan(Block):
    """The placement of each call of a run, as found by the flow `plan`.

    Example:
        Load a plan and run a configuration under it:

        ```python
        from prefect_rlhf.blocks.plan import StoredPlan

        found = StoredPlan.load("BLOCK_NAME")
        config = config.model_copy(update={"plan": found.assignments})
        ```
    """

    _block_type_name = "RLHF Execution Plan"
    _block_type_slug = "rlhf-execution-plan"
    _documentation_url = "https://docs.prefect.io/v3/develop/blocks"  # pyright: ignore[reportAssignmentType]

    algorithm: str = Field(description="The algorithm whose calls are placed, e.g. ppo.")
    n_hosts: int = Field(gt=0, description="Number of hosts that the plan is for.")
    devices_per_host: int = Field(gt=0, description="Number of ranks (GPUs or CPU slots) on each host.")
    assignments: ManualAssignments = Field(description="Call -> placement, e.g. 0-3 d2 t2 m4.")
    iteration_time_s: float = Field(gt=0, description="Predicted seconds per iteration.")
    lower_bound_s: float = Field(
        ge=0, description="Seconds per iteration that every plan of the class needs at least."
    )
    proof_class: str = Field(description="The plans for which the lower bound holds.")
