"""A user's own code, beside a rank: rewards, environments and agents, what they are called with, and their processes.

Torch-free. Reward models are not here: they run on the engines, like other models. Which sequences take turns with an
environment is in algorithms/shared/generation.py.
"""
