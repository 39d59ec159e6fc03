"""Prefect blocks; Prefect's server imports this package through the entry point `prefect.collections`."""

from blocks.cluster import RlhfCluster
from blocks.plan import ExecutionPlan
from blocks.ppo import PPOConfiguration

__all__ = ["ExecutionPlan", "PPOConfiguration", "RlhfCluster"]
