"""Measured profiles: what ranks time, and the run that has them do it.

What the planner makes of the figures is in planner/pricing.
"""
