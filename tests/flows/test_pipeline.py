"""Flow `rlhf-pipeline`: each stage once, on the models of earlier ones; the demo, and PPO on its models."""

import asyncio
import json

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from transformers import AutoModelForCausalLM

from prefect_rlhf.flows import pipeline
from prefect_rlhf.flows.pipeline import Demo, rlhf_pipeline, settle_seed
from prefect_rlhf.flows.ppo import rlhf_ppo
from prefect_rlhf.flows.run import prepare
from prefect_rlhf.flows.run.reporting import write_report
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, make_pipeline
from prefect_rlhf.rlhf_tasks.data.token_file import new_token_file
from tests.tiny_runs import write_model, write_prompts

SEED = 3
ITERATIONS = {
    stage: {"total_iterations": number} for stage, number in {"sft": 7, "reward-model": 2, "ppo": 2}.items()
}
"""Of the demo's 10, 8 and 20. What all of them teach is seen on one rank, in tests/deployments/test_demo.py."""


@pytest.fixture
def finished(tmp_path, monkeypatch):
    """The folder of a finished demo of seed 1; nothing can be started."""

    def start(*arguments):
        raise AssertionError("a finished demo was started again")

    monkeypatch.setattr(pipeline, "demo_at", start)
    settle_seed(tmp_path, 1)
    (tmp_path / "summary.json").write_text(json.dumps({"seconds": 400.0, "accuracy_after": 0.9}))
    return tmp_path


def test_a_finished_demo_keeps_its_summary_and_its_seed(finished):
    before = (finished / "summary.json").read_text()
    assert asyncio.run(rlhf_pipeline.fn(str(finished), 1)) == json.loads(before)
    assert (finished / "summary.json").read_text() == before
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
        return {
            name: config.model_copy(update=ITERATIONS.get(name, {})) for name, config in whole(demo).items()
        }

    monkeypatch.setattr(Demo, "stages", shortened)
    monkeypatch.chdir(tmp_path)
    summary = asyncio.run(rlhf_pipeline("runs/demo", SEED))
    demo = tmp_path / "runs" / "demo"
    assert summary == json.loads((demo / "summary.json").read_text())
    assert summary["iterations"] == 2
    assert 0.0 < summary["accuracy_before"] < 0.6, "supervision on sloppy demonstrations, a part of it"
    before, after = (demo / "stages" / stage / "model" / "model.safetensors" for stage in ("sft", "ppo"))
    assert before.read_bytes() != after.read_bytes(), "two iterations may change no answer"
    measured = {
        name: stage_config(demo, f"accuracy-{name}")["models"]["actor"] for name in ("before", "after")
    }
    assert measured == {"before": str(demo / "stages" / "sft" / "model"), "after": summary["model"]}
    assert stage_config(demo, "ppo")["reward_model"]["std"] != 1.0, "the calibration's"

    page = write_report(demo / "stages").read_text()
    order = "sft, pairs, reward-model, calibration, accuracy-before, ppo, accuracy-after"
    assert f"A pipeline: {order}." in page

    made = {path: path.stat().st_mtime_ns for path in demo.glob("stages/*/summary.json")}
    again = asyncio.run(rlhf_ppo())
    assert {path: path.stat().st_mtime_ns for path in made} == made, "the models were there already"
    (fresh,) = tmp_path.glob("runs/ppo-*")
    assert again == json.loads((fresh / "summary.json").read_text())
    settings = json.loads((fresh / "config.json").read_text())
    assert (settings["seed"], settings["models"]) == (SEED, stage_config(demo, "ppo")["models"])


REWARD = "def right(completions, answer):\n    return [float(a in c) for c, a in zip(completions, answer)]\n"


@pytest.fixture
def document(tmp_path):
    """SFT with evaluations, and an evaluation of the best model that it leaves."""
    write_model(tmp_path / "base")
    rows = [{"prompt": f"{i:x} says ", "completion": str(i % 7)} for i in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_prompts(tmp_path / "prompts.jsonl", 10)
    (tmp_path / "judge.py").write_text(REWARD)
    rewards = [{"function": f"{tmp_path / 'judge.py'}:right"}]
    held_out = {"data": str(tmp_path / "prompts.jsonl"), "max_completion_length": 4}
    return {
        "type": "pipeline",
        "name": "mine",
        "output_dir": str(tmp_path / "runs"),
        "seed": 3,
        "cluster": {"devices_per_host": 2},
        "stages": [
            {
                "name": "sft",
                "type": "sft",
                "models": {"actor": str(tmp_path / "base")},
                "data": {"train": str(tmp_path / "rows.jsonl")},
                "batch_size": 8,
                "total_iterations": 3,
                "optimizer": {"learning_rate": 1e-2},
                "rewards": rewards,
                "evaluation": {**held_out, "every": 2, "keep_best": 1},
            },
            {
                "name": "score",
                "type": "evaluate",
                "models": {"actor": "stage:sft"},
                "data": {"train": str(tmp_path / "prompts.jsonl")},
                "sampling": {"max_completion_length": 4},
                "rewards": rewards,
                "batch_size": 4,
            },
        ],
    }


def run(document):
    return asyncio.run(rlhf_pipeline(config=make_pipeline(document)))


async def artifacts_of(flow_run):
    """Key -> texts of the artifacts of the newest flow run of a name, in the order in which they were made."""
    async with get_client() as client:
        named = FlowRunFilter(name=FlowRunFilterName(any_=[flow_run]))
        runs = await client.read_flow_runs(flow_run_filter=named)
        newest = max(runs, key=lambda run: run.created)
        found = [one for one in await client.read_artifacts(limit=200) if one.flow_run_id == newest.id]
    made: dict[str, list[str]] = {}
    for one in sorted(found, key=lambda one: one.created):
        made.setdefault(one.key, []).append(one.data)
    return made


@pytest.fixture
def tokenised(monkeypatch):
    """The folders of the runs whose rows are tokenised, one entry for each time."""
    places = []

    def counted(place, *facts):
        places.append(place.name)
        return new_token_file(place, *facts)

    monkeypatch.setattr("prefect_rlhf.rlhf_tasks.algorithms.examples.new_token_file", counted)
    return places


@pytest.fixture
def preparations(monkeypatch):
    """The types of the runs that are prepared, one entry for each time."""
    types, prepare_once = [], prepare._prepare

    def counted(config, *more):
        types.append(config.type)
        return prepare_once(config, *more)

    monkeypatch.setattr(prepare, "_prepare", counted)
    return types


@pytest.mark.whole
@pytest.mark.cluster
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("prefect")
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_stages_run_once_and_go_on_where_they_ended(document, tmp_path, monkeypatch, tokenised, preparations):
    summary = run(document)
    assert preparations == ["sft", "evaluate"], "each is prepared once"
    assert len(tokenised) == 3, "the rows and held-out rows of the first stage, and the rows of the second"
    folder = tmp_path / "runs" / "mine"
    assert summary == json.loads((folder / "summary.json").read_text())
    assert json.loads((folder / "stages.json").read_text()) == {"stages": ["sft", "score"]}
    assert "A pipeline: sft, score." in (folder / "report.html").read_text()
    assert {name: stage["type"] for name, stage in summary["stages"].items()} == {
        "sft": "sft",
        "score": "evaluate",
    }
    rows = [json.loads(line) for line in (folder / "sft" / "metrics.jsonl").read_text().splitlines()]
    scores = {row["iteration"] + 1: row["eval/reward"] for row in rows if "eval/reward" in row}
    assert set(scores) == {2, 3}
    best = max(scores, key=lambda step: (scores[step], -step))
    assert summary["stages"]["sft"]["model_step"] == best
    assert summary["model"] == str(folder / "sft" / "model")
    found = summary["stages"]["score"]["scores"]
    assert found["samples"] == 10, "the last batch begins the rows again, which counts nothing"
    assert found["reward"] == pytest.approx(scores[best]), "the exported model is the one that was evaluated"

    (page,) = asyncio.run(artifacts_of("pipeline/mine"))["result"]
    assert page.startswith(f"# Mean reward\\: {found['reward']:.3f} in score".replace(".", "\\."))
    (begun,) = (folder / "score" / "flow-runs").iterdir()
    assert f"| [score](/runs/flow-run/{begun.name}) | evaluate |" in page
    told = asyncio.run(artifacts_of("evaluate/score"))
    assert {key: len(texts) for key, texts in told.items()} == dict.fromkeys(told, 1), "each once"
    order = ["execution-plan", "progress", "device-timeline", "completions", "scores", "planned-and-measured"]
    assert list(told) == order
    assert "| reward |" in told["scores"][0]
    trained = asyncio.run(artifacts_of("sft/sft"))
    assert {key: len(texts) for key, texts in trained.items()} == dict.fromkeys(trained, 1), "each once"

    def start(*arguments, **options):
        raise AssertionError("a finished stage was started again")

    made = {path: path.stat().st_mtime_ns for path in folder.glob("*/summary.json")}
    with monkeypatch.context() as nothing_starts:
        nothing_starts.setattr("prefect_rlhf.flows.pipeline.cluster_of", start)
        again = run(document)
        assert preparations == ["sft", "evaluate"] * 2, "each is compared with what it was"
        assert {**again, "seconds": 0} == {**summary, "seconds": 0}
        assert {path: path.stat().st_mtime_ns for path in made} == made

        document["stages"][0]["optimizer"]["learning_rate"] = 2e-2
        with pytest.raises(ConfigError, match=r"stage 'sft': .*optimizer.learning_rate 0.01 \(now 0.02\)"):
            run(document)
        document["stages"][0]["optimizer"]["learning_rate"] = 1e-2

    (folder / "score" / "summary.json").unlink()  # as if it had been interrupted
    attempts = len(list((folder / "score" / "attempts").iterdir()))
    third = run(document)
    assert third["stages"]["score"]["scores"] == found
    assert len(list((folder / "score" / "attempts").iterdir())) == attempts + 1, "it continued in its folder"
    assert (folder / "sft" / "summary.json").stat().st_mtime_ns == made[folder / "sft" / "summary.json"]


@pytest.mark.whole
@pytest.mark.cluster
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("prefect")
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_a_stage_goes_on_from_the_adapter_that_an_earlier_one_leaves(document, tmp_path):
    """DPO with adapters on those of SFT: the score of the second stage's model is that of a whole model."""
    pairs = [{"prompt": f"{i:x} says ", "chosen": str(i % 7), "rejected": "x"} for i in range(16)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    sft, score = document["stages"]
    sft |= {"lora": {"rank": 4}, "total_iterations": 2}
    del sft["evaluation"], sft["rewards"]
    dpo = {
        **sft,
        "name": "dpo",
        "type": "dpo",
        "models": {"actor": "stage:sft"},
        "data": {"train": str(tmp_path / "pairs.jsonl")},
    }
    score["models"]["actor"] = "stage:dpo"
    document["stages"] = [sft, dpo, score]
    summary = run(document)
    folder = tmp_path / "runs" / "mine"
    assert (folder / "sft" / "model" / "adapter_config.json").exists()
    assert (folder / "dpo" / "model" / "config.json").exists()
    assert not (folder / "dpo" / "model" / "adapter_config.json").exists()
    AutoModelForCausalLM.from_pretrained(folder / "dpo" / "model")
    first = json.loads((folder / "dpo" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-3), (
        "the reference is what the first stage left"
    )
    assert summary["stages"]["score"]["scores"]["samples"] == 10
