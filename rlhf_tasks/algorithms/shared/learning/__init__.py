"""Inference under other policies, and the optimizer steps of train calls: scores in groups, losses, schedule, statistics.

A loss that only one algorithm has is in that algorithm's folder.
"""
