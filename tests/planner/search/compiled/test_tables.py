import gc

import pytest

from prefect_rlhf.planner.search.compiled.tables import uncollected


def test_the_garbage_collector_is_on_again_after_a_pause():
    def fail():
        with uncollected():
            assert not gc.isenabled()
            with uncollected():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise KeyError

    assert gc.isenabled()
    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()
