import json

import pytest

from planner.plan.mesh import Cluster
from planner.plan.workload import RoleModel
from planner.pricing.measured import MeasuredProfile, ProfileError
from planner.pricing.profile_cache import cache_file, cached, read_profiles, store
from rlhf_tasks.profiling.measurements import Measurements, Timed


@pytest.fixture
def profile(llama) -> MeasuredProfile:
    timed = Timed(operation="layer/forward", tp=1, tokens=8, context=8, seconds=0.5)
    return MeasuredProfile.of(
        "h100-sxm", 2, 8, llama(), 2, [Measurements(operations=(timed,))], dispatch_s=0.25
    )


def test_a_stored_profile_comes_back_the_same(tmp_path, profile):
    assert read_profiles(store(profile, tmp_path)) == (profile,)


def test_the_cache_knows_device_cluster_model_and_precision(tmp_path, sampled, tiny, llama):
    profile, here = sampled(), Cluster(1, 4)
    store(profile, tmp_path)
    models = {"actor": RoleModel(shape=tiny), "critic": RoleModel(shape=tiny, head="scalar")}
    other = {"actor": RoleModel(shape=llama())}
    assert cached(tmp_path, "cpu-slot", here, models, 4) == ((profile,), ())
    assert cached(tmp_path, "h200-sxm", here, models, 4) == ((), ())
    assert cached(tmp_path, "cpu-slot", Cluster(2, 4), models, 4) == ((), ())
    assert cached(tmp_path, "cpu-slot", here, models, 2) == ((), ())
    assert cached(tmp_path, "cpu-slot", here, other, 4) == ((), ())


def test_the_file_is_named_by_what_it_is_of(tmp_path, profile, llama):
    assert store(profile, tmp_path) == cache_file(tmp_path, "h100-sxm", Cluster(2, 8), llama(), 2)
    assert store(profile, tmp_path).name.startswith("h100-sxm-llama-")


def test_a_file_that_is_no_profile_is_refused(tmp_path, profile):
    path = store(profile, tmp_path)
    document = json.loads(path.read_text())
    document[0]["operations"][0]["seconds"] = -1
    path.write_text(json.dumps(document))
    with pytest.raises(ProfileError, match=r"seconds=-1.* impossible figure.*prefect-rlhf profile"):
        read_profiles(path)
    path.write_text("no JSON")
    with pytest.raises(ProfileError, match="no profile"):
        read_profiles(path)
