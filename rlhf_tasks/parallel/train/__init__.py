"""The engine: passes through the pipeline, gradients, the sharded optimizer.

Decoding is in parallel/generate.
"""
