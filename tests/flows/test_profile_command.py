"""`prefect-rlhf profile`: what it needs, and what it refuses."""

from rlhf_tasks.config import make_config
from tests.flows.checked_files import LLAMA, refused


def test_what_cannot_be_measured_is_refused(call, document, tmp_path):
    document["data"]["train"] = str(tmp_path / "nowhere.jsonl")
    refused(call, "nowhere.jsonl", command=("profile", "--config", "FILE"))


def test_a_profile_needs_no_file_of_a_model_but_its_configuration(call, document, tmp_path, monkeypatch):
    from flows import session

    measured = []
    monkeypatch.setattr(session, "profile_here", lambda config, out: measured.append(config))
    document["planning"] = {"prompt_tokens": 4}
    for file in (tmp_path / "model").iterdir():
        if file.name != "config.json":
            file.unlink()
    assert call("profile", "--config", "FILE")[0] == 0
    document["models"]["actor"] = {"config": LLAMA}
    refused(call, "role 'actor' are given inline", command=("profile", "--config", "FILE"))
    assert len(measured) == 1


def test_a_profile_that_is_damaged_is_refused(call, document, tmp_path):
    """The cache is read with the plan; the sentence names the file."""
    from flows.planning import hardware_of, problem_of
    from planner.profile_cache import cache_file

    config = make_config({**document, "output_dir": str(tmp_path / "runs"), "plan": "heuristic"})
    hardware = hardware_of(config)
    model = problem_of(config, hardware).model
    shape = model.models["actor"].shape
    path = cache_file(
        tmp_path / "runs/profiles", hardware.classes.profiles[0].name, hardware.cluster, shape, 4
    )
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    document |= {"output_dir": str(tmp_path / "runs")}
    refused(call, path.name, "prefect-rlhf profile", command=("plan", "--config", "FILE"))
