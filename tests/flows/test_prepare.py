"""What is decided before a run: `plan: auto` is searched once in a run's life and kept in its folder."""

import json
from pathlib import Path

import pytest

from flows import prepare
from flows.demo_data import write_model_folder
from flows.planning import shapes_of
from flows.prepare import PLAN, make_plan
from planner.search import find_plan
from rlhf_tasks.config import AnyConfig, ConfigError, make_config
from tests.flows.test_plan_command import CALLS, ppo


def auto(**changes) -> AnyConfig:
    return make_config(ppo(plan="auto", planning={"prompt_tokens": 16, "time_limit_s": 2}, **changes))


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A run folder with its plan."""
    config = auto()
    (tmp_path / PLAN).write_text(make_plan(config, shapes_of(config)).model_dump_json())
    return tmp_path


def test_auto_is_the_search_within_its_time_and_seed(monkeypatch):
    asked = {}

    def find(problem, mode="search", time_limit_s=60.0, seed=0):
        asked.update(mode=mode, time_limit_s=time_limit_s, seed=seed)
        return find_plan(problem, "heuristic")

    monkeypatch.setattr(prepare, "find_plan", find)
    config = auto(seed=7)
    plan = make_plan(config, shapes_of(config))
    assert asked == {"mode": "search", "time_limit_s": 2.0, "seed": 7}
    assert {node.name for node in plan.nodes if node.kind == "call"} == CALLS


def test_a_resumed_run_keeps_its_plan_and_plans_nothing(kept, monkeypatch):
    def find(*arguments, **options):
        raise AssertionError("planned anew")

    monkeypatch.setattr(prepare, "find_plan", find)
    config = auto()
    plan = make_plan(config, shapes_of(config), kept)
    assert json.loads(plan.model_dump_json()) == json.loads((kept / PLAN).read_text())


def test_a_plan_by_hand_is_not_taken_from_the_folder(kept):
    config = make_config(ppo(plan={name: {"devices": [1]} for name in CALLS}))
    plan = make_plan(config, shapes_of(config), kept)
    assert all(node.devices == (1,) for node in plan.nodes)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"batch_size": 16}, ("plan of another graph", "8 sequences", "Remove it")),
        ({"type": "grpo"}, ("plan of another graph", "critic_train", "Remove it")),
        ({"cluster": {"devices_per_host": 4}}, ("a plan for 2 devices", "the cluster is 1x4", "Remove it")),
    ],
)
def test_a_kept_plan_of_another_run_is_refused(kept, change, parts):
    config = auto(**change)
    with pytest.raises(ConfigError) as refused:
        make_plan(config, shapes_of(config), kept)
    for part in parts:
        assert part in str(refused.value)


def test_a_kept_plan_that_cannot_be_read_is_refused(kept):
    (kept / PLAN).write_text("{")
    config = auto()
    with pytest.raises(ConfigError, match="is no execution plan"):
        make_plan(config, shapes_of(config), kept)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [({}, "models.actor is an inline config, which has no weights"), ({"type": "grpo"}, "type: grpo")],
)
def test_what_can_only_be_planned_does_not_run(change, sentence):
    with pytest.raises(ConfigError, match=sentence):
        prepare.prepare(make_config(ppo(**change)))


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        (None, "actor' has neither model.safetensors nor model.safetensors.index.json"),
        ({"a": "one.safetensors", "b": "two.safetensors"}, "files that are not there: two.safetensors"),
    ],
)
def test_missing_weights_are_named_before_anything_starts(tmp_path: Path, index, sentence: str):
    write_model_folder(tmp_path / "actor")
    if index:
        (tmp_path / "actor" / "one.safetensors").touch()
        text = json.dumps({"weight_map": index})
        (tmp_path / "actor" / "model.safetensors.index.json").write_text(text)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "ab>", "completion": "ba"}) + "\n")
    document = {
        "type": "sft",
        "models": {"actor": str(tmp_path / "actor")},
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "batch_size": 1,
        "total_iterations": 1,
    }
    with pytest.raises(ConfigError, match=sentence):
        prepare.prepare(make_config(document))
    drawn = make_config({**document, "random_init": True})
    assert prepare.prepare(drawn).iterations == 1
