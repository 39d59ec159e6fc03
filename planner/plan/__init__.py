"""Execution plans: graph, meshes, inserted nodes, total order, steady state.

Nothing here knows how long a call takes: prices are in planner/pricing.
"""
