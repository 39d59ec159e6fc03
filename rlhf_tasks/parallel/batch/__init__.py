"""Samples and micro-batches on the ranks, and their redistribution from one placement to another.

Reading rows from files is in rlhf_tasks/data.
"""
