"""What every Dask worker process of ours does first."""

import logging
import multiprocessing
from inspect import getsource

import pytest
from distributed import Worker
from distributed.comm import CommClosedError

from rlhf_tasks.rank.worker_process import end_with_nanny, is_news


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_lives_however_its_nanny_starts_processes(method):
    """Of a fork server the starter is not the parent."""
    process = multiprocessing.get_context(method).Process(target=end_with_nanny)
    process.start()
    process.join(60)
    assert process.exitcode == 0


class Logged(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


def test_dask_says_it_in_these_words():
    assert "during heartbeat" in getsource(Worker.heartbeat)


@pytest.mark.parametrize(
    ("error", "told"), [(CommClosedError("the scheduler has ended"), 0), (TimeoutError("no answer"), 1)]
)
def test_a_heartbeat_that_meets_a_closed_scheduler_leaves_no_traceback(error, told):
    logger, seen = logging.getLogger("distributed.worker.test_heartbeat"), Logged()
    logger.addHandler(seen)
    logger.addFilter(is_news)
    try:
        raise error
    except OSError:
        logger.exception("Failed to communicate with scheduler during heartbeat.")
    assert len(seen.records) == told
