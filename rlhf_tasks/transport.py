"""The messages between controller and ranks, and how one process asks another: Dask comm handlers.

A message is one pydantic model as JSON bytes; every message has exactly one answer. A message or its answer
may be lost: senders send again, receivers are idempotent (rlhf_tasks/protocol). Torch-free.
"""

from typing import Any

from pydantic import Field

from rlhf_tasks.spec import ExecutionPlan, Frozen


class GenerationSpec(Frozen):
    """One generation of process groups as one rank sees it: all that its executor needs to join and to load.

    rank, n_ranks  this rank's global rank (= device id) and how many ranks join
    config         the run's configuration, JSON-able; the executor parses it
    run_folder     a folder that all hosts share
    restore_step   the commit to restore from; None = initialise, and save every trained role as step 0
    store_host, store_port, store_prefix   the controller's TCPStore and this generation's PrefixStore
    timeout_s      timeout of every process group: longer than any node's deadline
    """

    run: str
    attempt: int
    generation: int
    rank: int
    n_ranks: int
    plan: ExecutionPlan
    config: dict[str, Any]
    run_folder: str
    restore_step: int | None
    store_host: str
    store_port: int
    store_prefix: str
    timeout_s: float


class SavedPart(Frozen):
    """A role's slice of one rank is durable on disk (every file written and synced), or could not be written.

    step     committed iterations that the snapshot stands for: a save node of iteration t makes step t + 1
    details  what the manifest needs to know about the part (file names, sizes, digests), JSON-able
    error    empty, or what went wrong (`No space left on device: PATH needs N bytes, M free`)
    """

    run: str
    attempt: int
    generation: int
    step: int
    role: str
    rank: int
    details: dict[str, Any] = Field(default_factory=dict)
    error: str = ""
