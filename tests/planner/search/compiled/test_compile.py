import pickle
import re

import pytest
from numba import typeof

from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.search.bounds.relaxation import relaxation
from prefect_rlhf.planner.search.compiled.compile import LINKED, PLANNER, _Index
from prefect_rlhf.planner.search.compiled.tables import Tables


def test_every_module_with_compiled_functions_makes_stale_code_stale():
    """A cached function has those of other modules inside."""
    users = {
        ".".join(path.relative_to(PLANNER).with_suffix("").parts)
        for path in PLANNER.rglob("*.py")
        if re.search(r"^@(compiled|inner)$", path.read_text(), re.MULTILINE)
    }
    assert len(users) > 5
    assert users <= set(LINKED)
    assert all(PLANNER.joinpath(*module.split(".")).with_suffix(".py").exists() for module in LINKED)


@pytest.mark.parametrize("index", [b"", b"no pickle", b"cplanner.search.compiled.arrays\nNoSuchClass\n."])
def test_an_index_of_kept_code_that_cannot_be_read_counts_as_empty(tmp_path, index):
    """As after an update that has renamed a class."""
    kept = _Index(str(tmp_path), "code", "stamp")
    kept.save("key", "data")
    assert kept.load("key") == "data"
    (path,) = tmp_path.glob("*.nbi")
    path.write_bytes(pickle.dumps(kept._version) + index)
    assert kept.load("key") is None
    kept.save("key", "again")
    assert kept.load("key") == "again"


@pytest.mark.parametrize(
    "figures", [{"host_memory": 100e9}, {"memory": 0.5e9}, {"calls": ("actor_generate", "actor_train")}]
)
def test_code_that_is_compiled_for_one_problem_serves_another(small_problem, figures):
    """Numba compiles anew, for a minute, where an argument is of another type."""
    usual, other = (Tables(small_problem(Cluster(1, 2), **given)) for given in ({}, figures))
    assert typeof(usual.arrays) == typeof(other.arrays)
    assert typeof(relaxation(usual)) == typeof(relaxation(other))
