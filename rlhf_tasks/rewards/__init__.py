"""A user's rewards: their forms, and the process beside a rank that runs them. Torch-free.

Reward models are models like others.
"""
