"""What calls, moves and plans cost in seconds and bytes, and where the figures come from.

Which plan is best is found in planner/search.
"""
