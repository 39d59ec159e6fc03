"""Environments: what answers a policy turn by turn, and the process beside a rank that runs them. Torch-free.

Which sequences take turns, and what becomes of the answers, is in algorithms/shared/sampling/turns.py.
"""
