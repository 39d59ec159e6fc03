"""How few first tokens samples share: for the engine, and for the planner, which loads no torch."""

LEAST_SHARED = 8
"""Fewest first tokens that neighbouring samples have in common and are computed once. Below, what is saved is less
than what attention spends on keys of another length."""
