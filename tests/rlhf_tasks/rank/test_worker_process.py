"""What every Dask worker process of ours does first."""

import multiprocessing

import pytest

from rlhf_tasks.rank.worker_process import end_with_nanny


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_lives_however_its_nanny_starts_processes(method):
    """Of a fork server the starter is not the parent."""
    process = multiprocessing.get_context(method).Process(target=end_with_nanny)
    process.start()
    process.join(60)
    assert process.exitcode == 0
