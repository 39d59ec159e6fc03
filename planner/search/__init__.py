"""The plan search: simulated annealing, branch and bound, baselines.

search/compiled prices choices in compiled loops; search/bounds has the lower bounds.
What a call or a transfer costs is in planner/pricing.
"""
