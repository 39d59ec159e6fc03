"""The commands of `prefect-rlhf`, one module for each group.

They check and print. The runs that they start are in flows/run.
"""
