"""Rewards are asked for a sample while others are drawn, and nothing that follows sees a difference."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.parallel.generate.generator import Order
from tests.loopback import Service, served
from tests.rlhf_tasks.algorithms.one_rank import OneRank
from tests.rlhf_tasks.algorithms.test_one_rank import N_SEQS, document, folder, weights, world

__all__ = ["folder", "world"]  # fixtures

OPTIONS: dict[str, dict[str, Any]] = {
    "grpo": {"num_generations": 2, "num_mini_batches": 1},
    "dapo": {"num_generations": 2, "num_mini_batches": 1, "filter_groups": 2},
    "remax": {},
}


@pytest.fixture
def service() -> Iterator[Service]:
    """It rewards an answer by its length."""
    with served(
        Service(lambda body: {"rewards": [len(text) / 8 for text in body["completions"]]})
    ) as service:
        yield service


@pytest.fixture
def start(folder: Path, tmp_path: Path, service: Service) -> Iterator[Any]:
    runs: list[OneRank] = []

    def make(kind: str, asks_early: bool = True, **changes: Any) -> OneRank:
        reward = {"url": f"{service.url}/score", "allow_private": True, "answers_per_request": 1}
        config = make_config(document(kind, folder, rewards=[reward], **OPTIONS[kind], **changes))
        runs.append(OneRank(config, tmp_path))
        runs[-1].asks_early = asks_early
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def test_a_service_is_asked_for_a_sample_before_the_last_one_has_been_drawn(start: Any, service: Service):
    """The first sample that ends is held up until the service has been asked for it."""
    run, ended = start("grpo"), list[int]()
    draw = run.generator.draw

    def held_up(batch: Any, order: Order) -> Any:
        on_ended = order.on_ended
        assert on_ended is not None

        def then(sample: int, tokens: Any) -> None:
            ended.append(sample)
            on_ended(sample, tokens)
            if len(ended) == 1:
                service.wait_for(1)
                assert len(service.asked) == 1

        return draw(batch, order._replace(on_ended=then))

    run.generator.draw = held_up
    metrics, _ = run.iterate(0)
    assert sorted(ended) == list(range(N_SEQS))
    assert len(service.asked) == N_SEQS, "each sample once"
    assert metrics["throughput/rewards_early"] == N_SEQS
    assert 0 <= metrics["throughput/rewards_waited_s"] < 60


@pytest.mark.parametrize("kind", OPTIONS)
def test_what_was_asked_early_changes_no_bit(start: Any, service: Service, kind: str):
    early, late = start(kind), start(kind, asks_early=False)
    for iteration in range(2):
        found, expected = early.iterate(iteration), late.iterate(iteration)
        for (metrics, _), n in ((found, N_SEQS), (expected, 0)):
            counts = [metrics.pop(name) for name in list(metrics) if name.endswith("/rewards_early")]
            assert counts
            assert min(counts) >= n if n else counts == [0.0] * len(counts)
            for name in list(metrics):
                if "throughput/" in name:
                    del metrics[name]
        assert found[0] == pytest.approx(expected[0], rel=0, abs=0, nan_ok=True)
    for name, weight in weights(late, "actor").items():
        assert torch.equal(weight, weights(early, "actor")[name])
    times = Counter(request["completions"][0] for request in service.asked)
    assert times
    assert all(n % 2 == 0 for n in times.values()), "each as often with as without"


def test_where_another_rank_scores_a_sample_nothing_is_asked(start: Any):
    run = start("grpo")
    run.scored_here = lambda *_: {0: 0, 3: 1}
    assert run.iterate(0)[0]["throughput/rewards_early"] == 2
