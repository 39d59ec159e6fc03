"""The one Prefect task: a plan node of one iteration, as the UI shows it.

It runs on a thread of the controller's worker and only watches: the ranks have their requests since the
iteration was entered, and the ledger says what is done.
"""

from dataclasses import asdict
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from rlhf_tasks import worker_process


@task(cache_policy=NO_CACHE, persist_result=False, retries=0)
def run_node(run: str, iteration: int, generation: int, node: str) -> dict[str, Any]:
    """Make sure that the iteration is delivered, wait until every rank has done the node, and tell what it
    cost.

    Returns the fields of its `NodeSummary`; nothing where it asks so late that the ledger has forgotten. Raises
    NodeAborted with rank, call, iteration and traceback of what failed.
    """
    summary = worker_process.process.deliver_and_wait(run, iteration, generation, node)
    return {} if summary is None else asdict(summary)
