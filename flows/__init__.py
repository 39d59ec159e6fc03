"""Entry points of the deployments, one module for each flow, and the command line.

What they share is in flows/run.
"""
