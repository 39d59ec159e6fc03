"""Samples and micro-batches on the ranks, and their way from one placement to another.

Rows of files are in rlhf_tasks/data.
"""
