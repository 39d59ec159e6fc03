"""Leases: one attempt of one run holds a rank at a time."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lease:
    """Who may give a rank work.

    client  names the controller's connection; the lease ends with it
    """

    run: str
    attempt: int
    client: str

    def __str__(self) -> str:
        return f"run {self.run!r}, attempt {self.attempt} (client {self.client})"


def refusal(holder: Lease | None, wanted: Lease) -> str | None:
    """Why `wanted` may not have a rank that `holder` has; None when it may.

    A later attempt of the same run takes over: the earlier one is known to have ended.
    """
    if holder is None or holder == wanted or (holder.run == wanted.run and holder.attempt < wanted.attempt):
        return None
    return (
        f"this rank is held by {holder}; {wanted} must wait until that run has ended, or use other workers."
    )
