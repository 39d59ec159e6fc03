"""The demo: its data, and its stages from random weights to a better policy.

Runs of users need nothing of it.
"""
