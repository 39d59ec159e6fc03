"""Values of Prefect Secret blocks: loaded once, from a server that the settings name, wherever these come from."""

import asyncio
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from prefect.blocks.system import Secret
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_rlhf.flows.rewards import secret_blocks, try_rewards
from prefect_rlhf.flows.run import training
from prefect_rlhf.flows.run.orders import Orders
from prefect_rlhf.flows.run.replanning import Replanning
from prefect_rlhf.flows.run.training import Attempts, ControllerLost, Restarts, TrainingResult
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, make_config
from prefect_rlhf.rlhf_tasks.checkpoint.changes import RunPlan
from tests.flows.checked_files import refused
from tests.rlhf_tasks.plans import small_plan


@pytest.fixture
def document(document, tmp_path):
    (tmp_path / "rewards.py").write_text("def good(completions, key): ...\n")
    function = f"{tmp_path / 'rewards.py'}:good"
    return {**document, "rewards": [{"function": function, "kwargs": {"key": {"block": "mine"}}}]}


@pytest.fixture
def loaded(monkeypatch):
    """The blocks that were asked for, of a server that has any."""
    asked = []

    async def load(name):
        asked.append(name)
        return SimpleNamespace(get=lambda: "the value")

    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(Secret, "aload", load)
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):  # as a profile would
        yield asked


def test_blocks_without_a_server_are_refused_before_anything_is_made(call, document, monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with temporary_settings({PREFECT_API_URL: None}):
        words = ("Prefect Secret block 'mine'", "no server is configured", "{env: VARIABLE}")
        refused(call, *words)
        refused(call, *words, command=("config", "validate", "FILE", "--rewards"))
        with pytest.raises(ConfigError, match="no server is configured"):
            asyncio.run(secret_blocks(make_config(document)))


def test_a_server_of_the_profile_is_asked_when_rewards_are_tried(document, loaded, monkeypatch):
    given = []

    def process(config, blocks):
        given.append(blocks)
        raise ConfigError("enough")

    monkeypatch.setattr("prefect_rlhf.flows.rewards.RewardProcess", process)
    with pytest.raises(ConfigError, match="enough"):
        next(try_rewards(make_config(document)))
    assert given == [{"mine": "the value"}]


def test_an_attempt_after_a_lost_controller_needs_no_server(
    document, tmp_path, monkeypatch, expected, loaded
):
    given = []

    async def train(spec, *_, **__):
        given.append(spec.blocks)
        if len(given) == 1:
            raise ControllerLost("gone", 0)
        return TrainingResult(2, ())

    @contextmanager
    def no_cluster(*_):
        yield None

    monkeypatch.setattr(training, "run_training", train)
    monkeypatch.setattr(training, "cluster_of", no_cluster)

    view = SimpleNamespace(
        api=None,
        starting=lambda: None,
        loading=lambda: None,
        say=lambda line: None,
    )
    prepared = SimpleNamespace(
        config=make_config(document),
        plans=(RunPlan(iteration=0, plan=small_plan()),),
        iterations=2,
        held_out={},
    )
    orders, restarts = Orders(lambda line: None), Restarts(tmp_path, 3)
    replanning = Replanning(prepared, tmp_path, {0: expected}, view.say)
    attempts = Attempts(prepared, tmp_path, {"mine": "the value"}, view, orders, replanning, restarts)
    asyncio.run(attempts.run(0))
    assert given == [{"mine": "the value"}] * 2
    assert loaded == []
