"""The planner: from an algorithm and a cluster to the execution plan with the shortest iteration. Loads no torch.

plan, pricing, search and report stand in this order: each imports only those before it.
"""
