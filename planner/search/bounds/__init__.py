"""Lower bounds on the period of every plan that completes a partial choice: what proofs are made of.

The walk that uses them is called by search/branch_and_bound.
"""
