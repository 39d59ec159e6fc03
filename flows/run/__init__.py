"""One run, from its configuration to its summary: preparation, planning, the loop, orders, the run folder.

How a run is shown is in flows/view. Its processes are in flows/cluster.
"""
