"""The plan search: simulated annealing, branch and bound, baselines.

search/compiled prices choices in compiled loops; search/bounds has the lower bounds. The prices themselves are made in
planner/pricing.
"""
