"""The commands of `prefect-rlhf`, a module for each group of them.

They check and print; what they start is in flows/run.
"""
