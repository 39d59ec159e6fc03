"""A user's rewards: their forms, and the process beside a rank that runs them. Torch-free.

Reward models are not here: they run on the engines, like other models.
"""
