"""A role's parameters and training state on their way: to other ranks, to the host, to files.

Commits of a run are in rlhf_tasks/checkpoint.
"""
