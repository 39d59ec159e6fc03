"""The engine: forward and backward passes through the pipeline, gradients, the sharded optimizer.

Decoding is in parallel/generate.
"""
