"""What several algorithms share: the calls of a rollout, scoring, the schedule of optimizer steps.

Code that only one algorithm needs is in that algorithm's folder.
"""
