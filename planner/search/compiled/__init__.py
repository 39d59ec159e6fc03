"""What a choice of options costs, as arrays and compiled code.

It equals what planner/pricing says in Python.
"""
