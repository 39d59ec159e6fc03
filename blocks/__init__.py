"""Prefect blocks; Prefect's server imports this package through the entry point `prefect.collections`.

What a run does with them is in flows/.
"""

from blocks.cluster import RlhfCluster
from blocks.plan import StoredPlan
from blocks.ppo import PPOConfiguration

__all__ = ["PPOConfiguration", "RlhfCluster", "StoredPlan"]
