"""Names of ours for an algorithm with other defaults: each module has a record, made by `Algorithm.preset`.

An algorithm of its own is a folder beside this one.
"""
