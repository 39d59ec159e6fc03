"""The demo: its data, and its stages from random weights to a better policy.

Users' own runs do not use it.
"""
