"""Generation: the decode loop, its KV cache, and sampling.

Passes over whole sequences are in parallel/train.
"""
