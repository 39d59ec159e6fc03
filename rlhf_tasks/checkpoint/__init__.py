"""What a run leaves on the disk and finds again: commits, journals, the log of plans, changes a user accepted.

The layout of training state is in rlhf_tasks/parallel/state.
"""
