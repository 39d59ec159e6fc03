"""What is refused of a cluster that runs already: a folder that its hosts do not share, other versions."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from flows.cluster import found_cluster
from flows.cluster_checks import SAME_VERSIONS
from flows.members import ClusterError

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def test_a_run_folder_that_a_worker_does_not_see_is_refused(cluster, tmp_path, monkeypatch):
    """A path that means another folder in each process stands for a folder that hosts do not share."""
    monkeypatch.chdir(tmp_path)
    private = Path("/proc/self/cwd")
    message = r"worker \S+ on host 127\.0\.0\.1 does not see the run folder /proc/self/cwd"
    with (
        pytest.raises(ClusterError, match=message),
        found_cluster(cluster.scheduler_address, 2, folder=private),
    ):
        pass
    with found_cluster(cluster.scheduler_address, 2, folder=tmp_path):
        pass
    assert not list(tmp_path.iterdir()), "the token file is left"


@pytest.mark.parametrize("package", SAME_VERSIONS)
def test_workers_of_other_versions_are_refused(cluster, tmp_path, monkeypatch, package):
    """Only this process sees the patched version; the workers look up their own."""
    there = re.escape(version(package))
    monkeypatch.setattr(
        "flows.cluster_checks.version", lambda name: "0.0.1" if name == package else version(name)
    )
    message = rf"worker tcp://\S+ has {package} {there}; this process has 0\.0\.1"
    with (
        pytest.raises(ClusterError, match=message),
        found_cluster(cluster.scheduler_address, 2, folder=tmp_path),
    ):
        pass
