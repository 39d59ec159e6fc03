"""The configuration of a run: its sections, its YAML file, its checks. Torch-free.

What an algorithm does with it is in rlhf_tasks/algorithms.
"""
