"""RLHF algorithms: dataflow graphs and the functions of their calls.

Nothing outside needs to know which ones there are.
"""
