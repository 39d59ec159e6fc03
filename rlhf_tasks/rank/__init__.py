"""A rank: the host of its engines, and the plan nodes that become engine calls.

What an engine does is in rlhf_tasks/parallel.
"""
