"""What several algorithms share: the calls of a rollout, scoring, the schedule of optimizer steps.

What one algorithm alone needs is in its folder.
"""
