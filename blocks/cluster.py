"""A cluster of ranks as a Prefect block."""

from typing import Any, Literal

from prefect.blocks.core import Block
from pydantic import Field, field_validator

from prefect_rlhf.rlhf_tasks.config.cluster import ClusterConfig
from prefect_rlhf.rlhf_tasks.config.settings import auto_or_a_number
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import MAX_DEVICES


class RlhfCluster(Block):
    """The ranks of a run: started on this machine, or found in a running Dask cluster.

    Example:
        Load a cluster and use it in a configuration:

        ```python
        from prefect_rlhf.blocks.cluster import RlhfCluster

        cluster = RlhfCluster.load("BLOCK_NAME")
        config = config.model_copy(update={"cluster": cluster.to_config()})
        ```
    """

    _block_type_name = "RLHF Cluster"
    _block_type_slug = "rlhf-cluster"
    _documentation_url = "https://docs.prefect.io/v3/develop/blocks"  # pyright: ignore[reportAssignmentType]

    address: str | None = Field(
        default=None, description="Scheduler of a running Dask cluster; without one, a cluster is started."
    )
    n_hosts: int = Field(default=1, gt=0, le=MAX_DEVICES, description="Number of hosts.")
    devices_per_host: int | Literal["auto"] = Field(
        default="auto",
        description="Number of ranks (GPUs or CPU slots) on each host, or auto: as many as suit this machine.",
    )

    @field_validator("devices_per_host", mode="before")
    @classmethod
    def _auto_or_a_number(cls, value: Any) -> Any:
        return auto_or_a_number(value, "ranks", MAX_DEVICES)

    def to_config(self) -> ClusterConfig:
        """This cluster as the `cluster` section of a run configuration."""
        return ClusterConfig(
            address=self.address, n_hosts=self.n_hosts, devices_per_host=self.devices_per_host
        )
