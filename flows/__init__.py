"""Entry points of the deployments, one module a flow, and the command line.

What they share is in flows/run.
"""
