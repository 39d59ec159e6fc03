"""The reward call, and what becomes of its scores: per token, compared in groups.

The processes that run rewards are in rlhf_tasks/rewards.
"""
