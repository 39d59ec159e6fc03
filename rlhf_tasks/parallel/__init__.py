"""3D-parallel engines on plain `torch.distributed`: they know neither Prefect nor Dask nor runs.

What is in it is told by its subpackages.
"""
