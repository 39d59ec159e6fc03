"""Where a run's processes live: its Dask cluster, its Prefect server, this machine, and how they all end.

What the workers compute is in rlhf_tasks.
"""
