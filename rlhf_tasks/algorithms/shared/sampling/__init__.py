"""The generate call: whole responses, segments, turns; samples that an iteration does not have.

How tokens are drawn is in rlhf_tasks/parallel/generate.
"""
