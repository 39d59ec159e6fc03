"""Finding the best plan: annealing, branch and bound, baselines.

The loops that are compiled are in search/compiled, the proofs in search/bounds.
"""
