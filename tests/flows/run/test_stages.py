"""Pipelines before they run: what a stage takes of earlier ones, and every refusal in one sentence."""

import json
from pathlib import Path

import pytest

from prefect_rlhf.flows.run.run_identity import check_stages
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_pipeline, stages_of
from tests.tiny_runs import write_model, write_prompts


@pytest.fixture
def document(tmp_path: Path):
    """SFT, PPO on its model, and an evaluation of what PPO makes of it."""
    write_model(tmp_path / "base")
    rows = [{"prompt": f"{i}>", "completion": "ab", "answer": "ab"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_prompts(tmp_path / "prompts.jsonl", 8)
    (tmp_path / "judge.py").write_text("def right(completions, answer):\n    return [1.0] * len(answer)\n")
    rewards = [{"function": f"{tmp_path / 'judge.py'}:right"}]
    prompts, sampling = {"train": str(tmp_path / "prompts.jsonl")}, {"max_completion_length": 4}
    return {
        "type": "pipeline",
        "name": "mine",
        "output_dir": str(tmp_path / "runs"),
        "stages": [
            {
                "name": "sft",
                "type": "sft",
                "models": {"actor": str(tmp_path / "base")},
                "data": {"train": str(tmp_path / "rows.jsonl")},
                "batch_size": 4,
                "total_iterations": 2,
            },
            {
                "name": "rl",
                "type": "ppo",
                "models": {"actor": "stage:sft"},
                "data": prompts,
                "sampling": sampling,
                "rewards": rewards,
                "batch_size": 4,
                "total_iterations": 2,
            },
            {
                "name": "score",
                "type": "evaluate",
                "models": {"actor": "stage:rl"},
                "data": prompts,
                "sampling": sampling,
                "rewards": rewards,
            },
        ],
    }


def test_a_sound_pipeline_is_validated_and_makes_no_files(call, tmp_path):
    before = call.files()
    status, out, err = call("config", "validate", "FILE")
    assert (status, err) == (0, "")
    assert "valid. 3 stages: sft, rl, score." in out
    assert call.files() == before


def stage(document, name):
    return next(one for one in document["stages"] if one["name"] == name)


FAULTS = {
    "a later stage": (
        lambda d: stage(d, "sft")["models"].update(actor="stage:rl"),
        "stage 'sft' takes the model of 'rl', which comes after it. A stage takes those of earlier ones.",
    ),
    "itself": (
        lambda d: stage(d, "rl")["models"].update(actor="stage:rl"),
        "stage 'rl' takes the model of itself.",
    ),
    "an unknown stage": (
        lambda d: stage(d, "rl")["models"].update(actor="stage:stf"),
        "stage 'rl' takes the model of 'stf', but the stages are sft, rl, score. Name one of them.",
    ),
    "a stage without a model": (
        lambda d: d["stages"].append(
            {**stage(d, "score"), "name": "again", "models": {"actor": "stage:score"}}
        ),
        "a run of type 'evaluate' trains none. Name a stage that trains.",
    ),
    "scores of a language model": (
        lambda d: stage(d, "rl")["models"].update(reward="stage:sft"),
        "stage 'rl' takes models.reward from 'sft', whose model gives no scores. Name a stage of type reward_model.",
    ),
    "two of one name": (
        lambda d: stage(d, "rl").update(name="sft"),
        "two stages have the name 'sft'. Rename one of them.",
    ),
    "no name": (lambda d: stage(d, "rl").pop("name"), "stages.1 has no name."),
    "no stages": (lambda d: d.update(stages=[]), "stages"),
    "a key of the pipeline": (
        lambda d: stage(d, "rl").update(output_dir="elsewhere"),
        "stage 'rl': output_dir belongs to the pipeline",
    ),
    "a fault in a stage": (
        lambda d: stage(d, "rl").update(batch_sise=3),
        "stage 'rl': batch_sise",
    ),
    "a missing file of a later stage": (
        lambda d: stage(d, "score").update(data={"train": "/nowhere/held_out.jsonl"}),
        "stage 'score': /nowhere/held_out.jsonl: no such file",
    ),
    "a missing reward of a later stage": (
        lambda d: stage(d, "score").update(rewards=[{"function": "no_module_of_this_name:f"}]),
        "stage 'score': reward no_module_of_this_name:f: there is no module",
    ),
    "an evaluation without rewards": (
        lambda d: stage(d, "score").update(rewards=[]),
        "stage 'score': nothing scores the answers.",
    ),
    "an unknown key": (lambda d: d.update(stagse=[]), "stagse"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_pipeline_is_refused_in_one_sentence_before_anything_starts(call, document, fault):
    change, told = FAULTS[fault]
    change(document)
    before = call.files()
    for command in (("run", "pipeline", "--config", "FILE"), ("config", "validate", "FILE")):
        status, _, err = call(*command)
        assert status == 2
        assert told in " ".join(err.split())
        assert "Traceback" not in err
    assert call.files() == before


def test_a_pipeline_is_begun_and_resumed_by_its_configuration_alone(call):
    for command in (
        ("run", "pipeline"),
        ("run", "pipeline", "--resume", "runs/mine"),
        ("run", "pipeline", "--config", "FILE", "--accept-changes"),
    ):
        status, _, err = call(*command)
        assert status == 2
        assert "A pipeline takes --config FILE and nothing else" in " ".join(err.split())


def test_a_stage_may_begin_with_a_file_and_replaces_its_keys(call, document, tmp_path, write):
    sft = stage(document, "sft")
    write({**sft, "name": "alone", "output_dir": "elsewhere", "resume": "auto"}, "sft.yaml")
    document["stages"][0] = {"name": "sft", "file": "sft.yaml", "total_iterations": 0}
    status, _, err = call("config", "validate", "FILE")
    assert (status, "stage 'sft': total_iterations" in err) == (2, True)
    document["stages"][0]["total_iterations"] = 1
    assert call("config", "validate", "FILE")[0] == 0


def test_an_override_reaches_a_stage(call):
    status, _, err = call("config", "validate", "FILE", "stages.1.batch_size=0")
    assert (status, "stage 'rl': batch_size" in err) == (2, True)


def test_the_stages_whose_models_are_there_are_prepared_for_the_ranks_that_all_share(document):
    document["cluster"] = {"devices_per_host": 2}
    checked = check_stages(stages_of(make_pipeline(document)))
    assert list(checked.prepared) == ["sft"], "the models of the others are still to be trained"
    assert checked.ranks == checked.prepared["sft"].plan.n_devices == 2
