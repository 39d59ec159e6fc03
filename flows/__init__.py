"""Entry points of the deployments, one module for each flow, and the command line.

What they share is in flows/run. What runs on the workers is in rlhf_tasks.
"""
