"""A user's rewards before a run: found in their source, called once, given their secrets.

How a rank calls them is in rlhf_tasks/rewards.
"""
