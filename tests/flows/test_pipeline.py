"""Flow `rlhf-pipeline`: what is finished is not run again."""

import asyncio
import json

import pytest

from flows import pipeline
from flows.demo import settle_seed
from flows.pipeline import rlhf_pipeline
from rlhf_tasks.config import ConfigError


@pytest.fixture
def finished(tmp_path, monkeypatch):
    """The folder of a finished demo of seed 1; nothing can be started."""

    def start(*arguments):
        raise AssertionError("a finished demo was started again")

    monkeypatch.setattr(pipeline, "demo_at", start)
    settle_seed(tmp_path, 1)
    (tmp_path / "summary.json").write_text(json.dumps({"seconds": 400.0, "accuracy_after": 0.9}))
    return tmp_path


def test_a_finished_demo_keeps_its_summary(finished):
    before = (finished / "summary.json").read_text()
    assert asyncio.run(rlhf_pipeline.fn(str(finished), 1)) == json.loads(before)
    assert (finished / "summary.json").read_text() == before


def test_a_finished_demo_of_another_seed_is_refused(finished):
    with pytest.raises(ConfigError, match="holds the demo of seed 1"):
        asyncio.run(rlhf_pipeline.fn(str(finished), 0))
