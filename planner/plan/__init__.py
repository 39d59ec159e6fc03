"""Execution plans: graph, meshes, inserted nodes, total order, steady state. Nothing here knows seconds of calls.

Prices are in planner/pricing.
"""
