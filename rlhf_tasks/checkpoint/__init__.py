"""The files by which a run can be resumed: commits, journals, the log of plans, and changes that a user accepted.

The layout of training state is in rlhf_tasks/parallel/train.
"""
