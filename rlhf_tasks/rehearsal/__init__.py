"""Rehearsals: runs of the real state machines and the real controller in virtual time, on simulated ranks and disks.

Decisions are those of rlhf_tasks/protocol and rlhf_tasks/controller. Here is only what they decide about: how long
things take, and what fails. Loads no torch and no Dask.
"""
