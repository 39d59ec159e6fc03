"""Measured profiles: the operations that ranks time, and the profile run that makes them do it.

The planner's use of the figures is in planner/pricing.
"""
