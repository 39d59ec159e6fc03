"""What people see of a run: the Prefect UI (subflows, artifacts, events, forms) and the terminal.

Nothing here decides a run: all of it may fail or be late.
"""
