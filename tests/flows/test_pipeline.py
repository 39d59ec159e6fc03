"""Flow `rlhf-pipeline`: every stage, once; and PPO without parameters on the models that it leaves."""

import asyncio
import json

import pytest

from flows import pipeline
from flows.demo.stages import Demo, settle_seed
from flows.pipeline import rlhf_pipeline
from flows.ppo import rlhf_ppo
from rlhf_tasks.algorithms.configurations import ConfigError

SEED = 3
ITERATIONS = 4  # of PPO, which has 20 of them; what comes before it is not shortened


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


def stage_config(demo, name):
    return json.loads((demo / "stages" / name / "config.json").read_text())


@pytest.mark.whole
@pytest.mark.cluster
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("prefect")
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_the_demo_goes_from_random_weights_to_a_policy_and_ppo_goes_on_from_its_models(tmp_path, monkeypatch):
    whole = Demo.stages

    def shortened(demo):
        stages = whole(demo)
        return {**stages, "ppo": stages["ppo"].model_copy(update={"total_iterations": ITERATIONS})}

    monkeypatch.setattr(Demo, "stages", shortened)
    monkeypatch.chdir(tmp_path)
    summary = asyncio.run(rlhf_pipeline("runs/demo", SEED))
    demo = tmp_path / "runs" / "demo"
    assert summary == json.loads((demo / "summary.json").read_text())
    assert summary["iterations"] == ITERATIONS
    assert 0.2 < summary["accuracy_before"] < 0.6, "supervision on sloppy demonstrations"
    assert summary["accuracy_after"] != summary["accuracy_before"]
    measured = {
        name: stage_config(demo, f"accuracy-{name}")["models"]["actor"] for name in ("before", "after")
    }
    assert measured == {"before": str(demo / "stages" / "sft" / "model"), "after": summary["model"]}
    assert stage_config(demo, "ppo")["reward_model"]["std"] != 1.0, "the calibration's"

    made = {path: path.stat().st_mtime_ns for path in demo.glob("stages/*/summary.json")}
    again = asyncio.run(rlhf_ppo())
    assert {path: path.stat().st_mtime_ns for path in made} == made, "the models were there already"
    (fresh,) = tmp_path.glob("runs/ppo-*")
    assert again == json.loads((fresh / "summary.json").read_text())
    settings = json.loads((fresh / "config.json").read_text())
    assert (settings["seed"], settings["models"]) == (SEED, stage_config(demo, "ppo")["models"])
