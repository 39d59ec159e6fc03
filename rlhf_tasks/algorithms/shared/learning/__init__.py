"""Inference under other policies; the optimizer steps of train calls: groups, losses, schedule, statistics.

A loss that only one algorithm has is in that algorithm's folder.
"""
