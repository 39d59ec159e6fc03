"""What several algorithms share: the calls of a rollout, scoring, policy losses and their steps, statistics.

Code that only one algorithm needs is in that algorithm's folder.
"""
