"""Figures that earlier runs left in the output folder never end a later command, whatever the files hold."""

import json

import pytest

from prefect_rlhf.flows.run.planning import hardware_of, problem_of, profile_folder
from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.flows.run.summary import keep_drift, planned, planned_and_measured
from prefect_rlhf.planner.pricing.figures import store
from prefect_rlhf.rlhf_tasks.spec import CallNode
from tests.planner.sampled import as_measured
from tests.tiny_runs import ppo_config

ABSURD = (0, -1, 1e300, 1e-300, float("nan"), float("inf"), "x", None, [], 10**30)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("base")


@pytest.fixture
def config(base, tmp_path):
    """PPO with Python rewards only, of no stated cost: its reward call is priced at 0 s."""
    changes = {"models": {"actor": str(base / "actor")}, "output_dir": str(tmp_path)}
    return ppo_config(base, cluster={"devices_per_host": 2}, **changes)


@pytest.fixture
def after_a_run(config):
    """What a run of three iterations leaves: a file of the figures of its calls, all of which drifted."""
    prepared = prepare(config)
    plan = prepared.plan
    expected = planned(config, plan, prepared.problem)
    assert expected.price.duration_s["reward_inference"] < 0.01, "its dispatch"
    lineage = [
        {
            "iteration": t,
            "node": node.name,
            "attempt": 1,
            "generation": 0,
            "clocks": {"0": (float(t), t + 0.5)},
            "started_s": float(t),
            "ended_s": t + 0.5,
        }
        for t in range(3)
        for node in plan.nodes
        if isinstance(node, CallNode)
    ]
    assert keep_drift(plan, expected, planned_and_measured(plan, expected, lineage))
    return expected.figures


def test_the_next_run_is_planned_by_what_a_run_with_python_rewards_only_found(config, after_a_run):
    prepared = prepare(config)
    assert prepared.warnings == ()
    price = planned(config, prepared.plan, prepared.problem).price
    assert price.duration_s["reward_inference"] == pytest.approx(0.5, rel=0.1)


def fate(config, path):
    """(whether its first reader is told where it lies now, whether it lies there, what the next reader is told)."""
    [warning] = problem_of(config, hardware_of(config)).warnings
    told = str(path) in warning and f"put aside as {path.name}.refused" in warning
    there = path.with_name(f"{path.name}.refused").exists()
    return told, there, problem_of(config, hardware_of(config)).warnings


PUT_ASIDE = (True, True, ())


@pytest.mark.parametrize(
    "text", ["", "[", "no JSON", "{}", "[[]]", "null", '[{"call": "a"}]', "[" * 10**5, "\ud800"]
)
def test_figures_of_runs_that_cannot_be_read_are_put_aside(config, after_a_run, text):
    after_a_run.write_bytes(text.encode(errors="surrogatepass"))
    assert fate(config, after_a_run) == PUT_ASIDE


def test_a_folder_in_the_figures_place_is_put_aside(config, after_a_run):
    after_a_run.unlink()
    after_a_run.mkdir()
    assert fate(config, after_a_run) == PUT_ASIDE


def test_the_warning_is_among_those_of_every_command(config, after_a_run):
    after_a_run.write_text("no JSON")
    assert "put aside" in prepare(config).warnings[0]


@pytest.mark.parametrize(
    ("figure", "sound"), [("seconds", ()), ("active_bytes", (0, 1e-300, None)), ("devices", ()), ("tp", ())]
)
def test_absurd_figures_of_runs_are_put_aside(config, after_a_run, figure, sound):
    text = after_a_run.read_text()
    for absurd in ABSURD:
        document = json.loads(text)
        for ran in document:
            placement = ran["assignment"]["placement"]
            if figure == "devices":
                placement["devices"] = [absurd] * len(placement["devices"])
            elif figure == "tp":
                placement["strategy"]["tp"] = absurd
            else:
                ran[figure] = absurd
        after_a_run.write_text(json.dumps(document))
        if absurd in sound:
            assert problem_of(config, hardware_of(config)).warnings == ()
        else:
            assert fate(config, after_a_run) == PUT_ASIDE


@pytest.fixture
def profile(config):
    hardware = hardware_of(config)
    (shape, *_) = {model.shape for model in problem_of(config, hardware).model.models.values()}
    found = as_measured(shape, hardware.cluster)
    return store(
        found.model_copy(update={"device": hardware.classes.profile(0).name}), profile_folder(config)
    )


def test_a_measured_profile_is_used(config, profile):
    prepared = prepare(config)
    assert "measured profile" in planned(config, prepared.plan, prepared.problem).source
    assert prepare(config).warnings == ()


@pytest.mark.parametrize("path", [("operations", 0, "seconds"), ("exchanges", 3, "seconds"), ("n_hosts",)])
def test_absurd_profiles_are_put_aside(config, profile, path):
    text = profile.read_text()
    for absurd in ABSURD[1:]:
        place = document = json.loads(text)
        for part in (0, *path[:-1]):
            place = place[part]
        place[path[-1]] = absurd
        profile.write_text(json.dumps(document))
        assert fate(config, profile) == PUT_ASIDE


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[" * 10**5,
        lambda text: json.dumps(
            [{**json.loads(text)[0], "operations": json.loads(text)[0]["operations"][:1]}]
        ),
        lambda text: json.dumps([{**json.loads(text)[0], "exchanges": []}]),
        lambda text: json.dumps([{**json.loads(text)[0], "device": "another"}]),
        lambda text: json.dumps(json.loads(text)[0]),
    ],
    ids=["cut off", "nested", "one operation", "no exchange", "another device", "no list"],
)
def test_profiles_that_are_not_whole_are_put_aside(config, profile, damage):
    profile.write_text(damage(profile.read_text()))
    assert fate(config, profile) == PUT_ASIDE
