"""What calls, transfers and plans cost in seconds and bytes, and where the figures come from.

The search for the best plan is in planner/search.
"""
