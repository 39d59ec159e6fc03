"""flows/run/samples_in_flight.py: which changes of a configuration let samples in flight go."""

from dataclasses import replace

import pytest

from flows.run.prepare import prepare
from flows.run.run_identity import FREE
from flows.run.samples_in_flight import keeps_samples
from rlhf_tasks.algorithms.configurations import make_config
from rlhf_tasks.algorithms.registry import OURS, algorithm, algorithm_names
from rlhf_tasks.algorithms.shared.policy_config import PolicyConfig

DECIDES = {
    "batch_size",
    "chunks",
    "data",
    "dtype",
    "environment",
    "models",
    "num_generations",
    "on_reward_error",
    "sampling",
    "seed",
    "staleness",
    "type",
}
"""All that decides which samples are in flight, whatever the algorithm; `total_iterations` only near the end."""
AHEAD = [
    record.config
    for record in map(algorithm, algorithm_names())
    if record.package == OURS and issubclass(record.config, PolicyConfig)
]


@pytest.fixture
def prepared(document):
    """A run that draws two iterations ahead, of ten iterations."""
    return prepare(make_config({**document, "staleness": 2, "total_iterations": 10}))


@pytest.mark.parametrize("kind", AHEAD, ids=lambda kind: kind.model_fields["type"].default)
def test_a_key_lets_samples_go_only_where_it_decides_what_is_drawn(prepared, kind):
    own = replace(prepared, config=kind.model_construct(**prepared.config.model_dump()))
    fields = set(kind.model_fields) - set(FREE) - {"total_iterations"}
    assert {field for field in fields if not keeps_samples(field, {}, own, 1)} == DECIDES & fields
    assert not keeps_samples("a_key_of_an_older_version", {}, own, 1)


@pytest.mark.parametrize(
    ("step", "ended", "ends", "stay"),
    [
        (7, 10, 20, True),
        (8, 10, 20, True),
        (9, 10, 20, False),  # iteration 11, counted from 1, was not drawn
        (10, 10, 20, False),
        (9, 10, 10, True),
        (7, 10, 8, True),
    ],
)
def test_another_end_lets_them_go_only_where_some_are_missing(prepared, step, ended, ends, stay):
    now = replace(prepared, iterations=ends)
    assert keeps_samples("total_iterations", {"total_iterations": ended}, now, step) == stay
    assert not keeps_samples("total_iterations", {}, now, step), "nobody knows what was drawn"
