"""A user's rewards before a run: looked up in their source, called once on request, given their secrets.

How a rank calls them is in rlhf_tasks/user_code.
"""
