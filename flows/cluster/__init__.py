"""Where a run lives: its Dask cluster, its Prefect server, this machine, and the clean end of all of them.

What is computed there is in rlhf_tasks.
"""
