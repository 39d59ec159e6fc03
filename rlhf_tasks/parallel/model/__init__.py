"""One pipeline stage of a decoder: transformers' layers, their slices, their weights in and out.

Passes through all stages are in parallel/train and parallel/generate.
"""
