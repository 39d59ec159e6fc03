"""Environments of other packages, as ours: a module for each kind in config/packages.py.

A module has `Environment(name, **kwargs)`, with `reset(row, seed)` and `step(text)` as in episodes.py, and
`starts(name, kwargs, first)`, whose items become rows (rows.py), where the environment itself says what the policy
reads first. Modules are loaded in the processes of environments only.
"""
