"""`prefect-rlhf profile`: what it needs, and what it refuses."""

import json

import pytest

from prefect_rlhf.flows.run.planning import hardware_of, problem_of
from prefect_rlhf.planner.pricing.figures import read_profiles
from prefect_rlhf.planner.report import figures_source
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from tests.flows.checked_files import LLAMA, refused


@pytest.fixture
def write_inline(document, tmp_path):
    """Make the document one of inline models of two shapes on GPUs, with some changes; gives it."""

    def make(**changes):
        models = {
            "actor": LLAMA,
            "reward": {**LLAMA, "num_hidden_layers": 1},
        }
        planning = {"prompt_tokens": 4, "device": "h100-sxm"}
        document.pop("rewards", None)
        document.update(models=models, planning=planning, output_dir=str(tmp_path / "runs"))
        document.update(changes)
        return document

    return make


def test_what_cannot_be_measured_is_refused(call, document, tmp_path):
    document["data"]["train"] = str(tmp_path / "nowhere.jsonl")
    refused(call, "nowhere.jsonl", command=("profile", "--config", "FILE"))


def test_a_profile_needs_no_file_of_a_model_but_its_configuration(call, document, tmp_path, monkeypatch):
    from prefect_rlhf.flows.commands import local_run as session

    measured = []
    monkeypatch.setattr(session, "profile_here", lambda config, out: measured.append(config))
    document["planning"] = {"prompt_tokens": 4}
    for file in (tmp_path / "model").iterdir():
        if file.name != "config.json":
            file.unlink()
    assert call("profile", "--config", "FILE")[0] == 0
    document["models"]["actor"] = LLAMA
    refused(call, "role 'actor' are given inline", command=("profile", "--config", "FILE"))
    assert len(measured) == 1


def computed(call, document, *arguments: str) -> str:
    """What `profile --analytic` says; it must succeed."""
    status, out, err = call("profile", "--config", "FILE", "--analytic", *arguments)
    assert (status, err) == (0, "")
    return out


@pytest.mark.timeout(1800)  # the first to evaluate plans compiles that
def test_a_profile_is_computed_of_inline_models_and_a_plan_goes_by_it_where_it_is_named(
    call, write_inline, tmp_path
):
    """The same plan at the same price as by the figures themselves, and it is said that they are computed."""
    document = write_inline()
    file = tmp_path / "computed.json"
    told = computed(call, document, "--out", str(file))
    assert f"profile computed from the preset of h100-sxm: {file}. " in told
    assert not (tmp_path / "runs").exists(), "nothing is kept where plans look for measured profiles"
    (actor, critic) = read_profiles(file)
    assert (actor.model.layers, critic.model.layers) == (2, 1), "one profile of each shape"
    assert (actor.n_hosts, actor.devices_per_host, actor.tp_degrees) == (1, 2, {1, 2})

    figures = tmp_path / "figures.json"
    found = []
    for arguments in ((), ("--profile", str(file))):
        command = ("plan", "--config", "FILE", "--mode", "heuristic", "--no-compare", "--json", str(figures))
        status, out, err = call(*command, *arguments)
        assert (status, err) == (0, "")
        found.append(json.loads(figures.read_text()))
        assert f"Priced by: {found[-1]['source']}.\n" in out.replace("\n  ", " ")
    stated, named = found
    assert (stated["source"], named["source"]) == (
        "preset of h100-sxm",
        "profile computed from the preset of h100-sxm",
    )
    assert named["iteration_time_s"] == pytest.approx(stated["iteration_time_s"], rel=0.02)
    assert {c: a["devices"] for c, a in named["assignments"].items()} == {
        c: a["devices"] for c, a in stated["assignments"].items()
    }


def test_a_computed_profile_is_not_taken_for_a_measured_one(call, write_inline, tmp_path):
    document = write_inline()
    computed(call, document)
    assert len(read_profiles(tmp_path / "runs/computed-profiles.json")) == 2
    config = make_config(document)
    problem = problem_of(config, hardware_of(config))
    assert figures_source(problem.model) == "preset of h100-sxm"


def test_a_profile_is_of_one_device_class(call, write_inline, tmp_path):
    devices = {"h100-sxm": 1, "a100-80g-sxm": 1}
    write_inline(
        cluster={"n_hosts": 2, "devices_per_host": 2}, planning={"prompt_tokens": 4, "device": devices}
    )
    for arguments in (("--analytic",), ()):
        refused(
            call,
            "several classes",
            "a profile is of one",
            command=("profile", "--config", "FILE", *arguments),
        )


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(call, document, tmp_path):
    for arguments in (("--analytic",), ()):
        command = ("profile", "--config", "FILE", "--out", str(tmp_path / "no/where.json"), *arguments)
        refused(call, "where.json cannot be written", command=command)


def test_figures_that_are_hardly_true_are_warned_about(call, write_inline, tmp_path):
    figures = tmp_path / "device.yaml"
    figures.write_text("like: h100-sxm\nname: mine\nflops_per_s: 989\n")
    write_inline(planning={"prompt_tokens": 4, "device": str(figures)})
    status, out, err = call("profile", "--config", "FILE", "--analytic")
    assert status == 0
    assert "flops_per_s=989 is implausible" in err
    assert "profile computed from the stated figures of mine: " in out
