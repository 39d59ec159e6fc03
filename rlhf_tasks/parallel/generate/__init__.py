"""Generation: the decode loop, its KV cache, and the choice of tokens.

Passes over whole sequences are in parallel/train.
"""
