"""The engine: forward and backward passes through the pipeline, gradients, the sharded optimizer, its
state in files.

Decoding is in parallel/generate.
"""
