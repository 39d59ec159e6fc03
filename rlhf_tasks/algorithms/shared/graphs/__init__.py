"""Graphs of model function calls as programs, and what changes them: staleness, segments, environments. Torch-free.

What the calls compute is in the rooms beside it.
"""
