"""The protocol between controller and ranks, as pure state machines and messages. Torch-free.

Connections, clocks and disks are in rlhf_tasks/controller and rlhf_tasks/rank.
"""
