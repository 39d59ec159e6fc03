"""One pipeline stage of a decoder: transformers' layers, their slices, loading and exporting weights.

Passes through all stages are in parallel/train and parallel/generate.
"""
