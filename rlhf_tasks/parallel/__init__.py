"""3D-parallel engines on plain `torch.distributed`. Nothing here knows Prefect, Dask or runs.

Each subpackage says what it contains.
"""
