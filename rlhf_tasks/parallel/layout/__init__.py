"""Which device holds what: strategies, shapes, slices, and the messages between two layouts. Pure Python, shared with
the planner.

The tensors themselves are moved in parallel/batch (samples) and parallel/comm (parameters).
"""
