"""The doctor: a model's folder on real ranks, split in several ways, against plain transformers.

The command is in flows/commands/configs.py; what a run checks before it starts is in flows/run.
"""
