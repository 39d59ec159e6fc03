"""Configurations, example plans and the deployments of `prefect deploy`."""
