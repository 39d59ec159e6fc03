import pytest

from prefect_rlhf.planner.plan.mesh import Cluster, DeviceMesh, MeshError, meshes, meshes_from_start
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import MAX_DEVICES


def test_meshes_of_a_cluster():
    found = [(mesh.first, mesh.size) for mesh in meshes(Cluster(3, 4))]
    assert len(set(found)) == len(found)
    assert set(found) == {
        *((first, 1) for first in range(12)),
        *((first, 2) for first in range(0, 12, 2)),
        *((first, 4) for first in range(0, 12, 4)),
        (0, 8),
        (4, 8),
        (0, 12),
    }


def test_a_part_divides_its_host():
    sizes = {mesh.size for mesh in meshes(Cluster(1, 6))}
    assert sizes == {1, 2, 3, 6}


@pytest.mark.parametrize(
    ("first", "size", "message"),
    [
        (1, 2, "not an aligned part"),
        (0, 3, "not an aligned part"),
        (2, 4, "not an aligned part"),
        (4, 8, None),
        (2, 8, "not whole hosts of 4"),
        (0, 6, "not whole hosts of 4"),
        (8, 8, "outside the cluster, which has devices 0 to 11"),
        (0, 0, "outside the cluster"),
    ],
)
def test_legal_meshes(first, size, message):
    if message is None:
        assert DeviceMesh(Cluster(3, 4), first, size).devices == tuple(range(4, 12))
    else:
        with pytest.raises(MeshError, match=message):
            DeviceMesh(Cluster(3, 4), first, size)


def test_the_mesh_of_some_devices():
    cluster = Cluster(3, 4)
    assert DeviceMesh.of(cluster, [3, 2]).devices == (2, 3)
    assert DeviceMesh.of(cluster, range(4, 12)).devices == tuple(range(4, 12))


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([0, 2], "not consecutive"),
        ([], "not consecutive"),
        ([1, 1], "not consecutive and distinct"),
        ([11, 12], r"devices \[12\] are outside"),
    ],
)
def test_devices_that_are_no_mesh_are_refused(devices, message):
    with pytest.raises(MeshError, match=message):
        DeviceMesh.of(Cluster(3, 4), devices)


def test_a_cluster_needs_devices():
    with pytest.raises(MeshError, match="n_hosts=0"):
        Cluster(0, 8)


def test_a_cluster_has_so_many_devices_and_no_more():
    assert Cluster(MAX_DEVICES // 8, 8).n_devices == MAX_DEVICES
    for n_hosts, per_host in ((MAX_DEVICES // 8 + 1, 8), (1, 10**8)):
        with pytest.raises(
            MeshError, match=f"are {n_hosts * per_host} devices; clusters of up to 131072 can"
        ):
            Cluster(n_hosts, per_host)


@pytest.mark.parametrize("cluster", [Cluster(3, 6), Cluster(1, 8)], ids=str)
def test_the_meshes_from_the_start_are_all_of_them_largest_first(cluster):
    sizes = [mesh.size for mesh in meshes_from_start(cluster)]
    assert sizes == sorted((mesh.size for mesh in meshes(cluster) if mesh.first == 0), reverse=True)
