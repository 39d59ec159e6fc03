"""The one Prefect task: a plan node of one iteration, as the UI shows it.

It runs on a thread of the controller's worker and only watches: the ranks have their requests since the
iteration was entered, and the ledger says what is done.
"""

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from rlhf_tasks import worker_process


@task(cache_policy=NO_CACHE, persist_result=False, retries=0)
def run_node(run: str, iteration: int, generation: int, node: str) -> dict[str, Any]:
    """Make sure that the iteration is delivered, wait until every rank has done the node, and tell what it
    cost.

    Returns ranks, started_s and ended_s (time.time(), first rank in, last rank out), bytes_sent (sum over
    ranks) and metrics (global values). Raises NodeAborted with rank, call, iteration and traceback of what
    failed.
    """
    results = worker_process.process.deliver_and_wait(run, iteration, generation, node)
    if not results:  # asked so late that the ledger has forgotten them
        return {}
    return {
        "ranks": sorted(results),
        "started_s": min(result.started_s for result in results.values()),
        "ended_s": max(result.ended_s for result in results.values()),
        "bytes_sent": sum(result.bytes_sent for result in results.values()),
        "metrics": results[min(results)].metrics,
    }
