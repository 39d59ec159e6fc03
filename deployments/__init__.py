"""Configurations, example plans and the deployments of `prefect deploy`.

No code of the product: it imports nothing from here.
"""
