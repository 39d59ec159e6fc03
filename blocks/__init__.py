"""Prefect blocks; Prefect's server imports this package through the entry point `prefect.collections`.

What a run does with them is in flows/.
"""

from prefect_rlhf.blocks.cluster import RlhfCluster
from prefect_rlhf.blocks.plan import StoredPlan
from prefect_rlhf.blocks.ppo import PPOConfiguration

__all__ = ["PPOConfiguration", "RlhfCluster", "StoredPlan"]
