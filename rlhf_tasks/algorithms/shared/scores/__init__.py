"""The reward call, and what becomes of its scores: at which tokens they count.

The processes that run rewards are in rlhf_tasks/user_code.
"""
