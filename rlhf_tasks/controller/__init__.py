"""The controller: carries out the ledger's instructions, and holds a link to every rank.

The decisions are in rlhf_tasks/protocol.
"""
