"""A PPO configuration as a Prefect block."""

from prefect.blocks.core import Block
from pydantic import Field

from prefect_rlhf.rlhf_tasks.algorithms.ppo import PPOConfig


class PPOConfiguration(Block):
    """The configuration of a PPO run, typed and validated, for deployments and schedules.

    Example:
        Load a stored configuration and run it:

        ```python
        from prefect_rlhf.blocks.ppo import PPOConfiguration
        from prefect_rlhf.flows.ppo import rlhf_ppo

        stored = PPOConfiguration.load("BLOCK_NAME")
        rlhf_ppo(stored.config)
        ```
    """

    _block_type_name = "RLHF PPO Configuration"
    _block_type_slug = "rlhf-ppo-configuration"
    _documentation_url = "https://docs.prefect.io/v3/develop/blocks"  # pyright: ignore[reportAssignmentType]

    config: PPOConfig = Field(description="The run's configuration, as in a YAML file.")
