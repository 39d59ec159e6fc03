"""Moves a role's parameters and training state: to other ranks, to host memory, to files.

Commits of a run are in rlhf_tasks/checkpoint.
"""
