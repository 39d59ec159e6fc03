"""How a run is shown to people: in the Prefect UI (subflows, artifacts, events, forms) and in the terminal.

A run does not depend on this code: any of it may fail or be late. What is shown is computed in flows/run.
"""
