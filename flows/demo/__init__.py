"""The demo: its data, its stages from random weights to a better policy, and its flow.

Runs of users need nothing of it.
"""
