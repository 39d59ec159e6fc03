"""What is refused of a cluster that runs already: a folder that its hosts do not share, other versions, other
devices."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from flows.cluster.checks import SAME_VERSIONS
from flows.cluster.cluster import found_cluster
from flows.cluster.this_machine import device_here
from flows.cluster.workers import ClusterError
from tests.rlhf_tasks.settings import STARTUP_S

pytestmark = [pytest.mark.cluster, pytest.mark.whole, pytest.mark.timeout(600)]


def test_a_run_folder_that_a_worker_does_not_see_is_refused(cluster, tmp_path, monkeypatch):
    """A path that means another folder in each process stands for a folder that hosts do not share."""
    monkeypatch.chdir(tmp_path)
    private = Path("/proc/self/cwd")
    message = r"worker \S+ on host 127\.0\.0\.1 does not see the run folder /proc/self/cwd"
    with (
        pytest.raises(ClusterError, match=message),
        found_cluster(cluster.scheduler_address, 2, folder=private, deadline_s=STARTUP_S),
    ):
        pass
    with found_cluster(cluster.scheduler_address, 2, folder=tmp_path, deadline_s=STARTUP_S):
        pass
    assert not list(tmp_path.iterdir()), "the token file is left"


@pytest.mark.parametrize("package", SAME_VERSIONS)
def test_workers_of_other_versions_are_refused(cluster, tmp_path, monkeypatch, package):
    """Only this process sees the patched version; the workers look up their own."""
    there = re.escape(version(package))
    monkeypatch.setattr(
        "flows.cluster.checks.version", lambda name: "0.0.1" if name == package else version(name)
    )
    message = rf"worker tls://\S+ has {package} {there}; this process has 0\.0\.1"
    with (
        pytest.raises(ClusterError, match=message),
        found_cluster(cluster.scheduler_address, 2, folder=tmp_path, deadline_s=STARTUP_S),
    ):
        pass


@pytest.mark.parametrize(
    ("kind", "needs", "message"),
    [
        (
            "another",
            {},
            r"worker rank-0 on host \S+ has a {here}, but the plan was made for another, .*=\1\.",
        ),
        (
            "{here}",
            {1: 1e15},
            r"worker rank-1 on host \S+ has (\d+) bytes .* needs 1000000000000000 there.*: \1\}",
        ),
    ],
    ids=["kind", "memory"],
)
def test_other_devices_than_a_plan_was_made_for_are_refused(cluster, tmp_path, kind, needs, message):
    here = device_here(4)
    assumed = here.model_copy(update={"name": kind.replace("{here}", here.name)})
    how = {"folder": tmp_path, "deadline_s": STARTUP_S, "devices_per_host": 4, "needs": needs}
    with (
        pytest.raises(ClusterError, match=message.replace("{here}", f"({here.name})")),
        found_cluster(cluster.scheduler_address, 4, assumed=assumed, **how),
    ):
        pass


def test_the_same_devices_with_memory_enough_are_not_refused(cluster, tmp_path):
    how = {
        "folder": tmp_path,
        "deadline_s": STARTUP_S,
        "devices_per_host": 4,
        "assumed": device_here(4),
        "needs": {0: 1.0},
    }
    with found_cluster(cluster.scheduler_address, 4, **how) as found:
        assert len(found.ranks) == 4
