"""A field that has TRL's name means what it means there, or the docs say how it differs."""

import sys
from importlib.util import find_spec

import pytest

from bench.trl_names import MEANING, kept_defaults, read, shared, table

KEPT = kept_defaults()


def test_the_table_has_what_differs_with_the_reason_and_names_the_rest():
    lines = table(KEPT).splitlines()
    assert "| `optimizer.warmup_steps` | 0 | the same | no share of the run: a number of steps |" in lines
    assert "`optimizer.weight_decay`" in lines[-1]


def test_every_field_with_trls_name_has_been_compared_and_no_other():
    assert sorted({one.field for one in shared(KEPT)}) == sorted(MEANING)


def test_every_default_that_differs_has_a_reason():
    assert [one.field for one in shared(KEPT) if not one.agrees and not MEANING[one.field]] == []


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
def test_the_defaults_that_are_kept_are_those_of_the_installed_trl():
    found = read(sys.executable)
    known = {name for name in found["fields"] if KEPT["versions"][name] == found["version"]}
    assert known, f"TRL {found['version']} is installed; python -m bench.trl_names --python reads it"
    assert {name: found["fields"][name] for name in known} == {name: KEPT["fields"][name] for name in known}
