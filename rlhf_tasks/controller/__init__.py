"""The controller: carries out what the ledger decides, and holds a link to every rank.

The decisions are in rlhf_tasks/protocol.
"""
