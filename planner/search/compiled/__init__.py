"""The price of a choice of options, from arrays by compiled code.

It equals the price that planner/pricing computes in Python.
"""
