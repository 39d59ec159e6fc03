"""RLHF algorithms: dataflow graphs and the functions of their calls.

No code outside depends on which algorithms exist.
"""
