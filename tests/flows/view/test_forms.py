"""flows/view/forms.py: the schema of a deployment's form, as Prefect makes it of a flow."""

import json
from typing import Annotated, ClassVar, Literal

import pytest
from jsonschema import Draft202012Validator
from prefect.utilities.schema_tools import validate
from pydantic import Field, TypeAdapter, ValidationError

from prefect_rlhf.flows.algorithms import grpo, reward_model, rollout, sft
from prefect_rlhf.flows.plan import plan
from prefect_rlhf.flows.ppo import rlhf_ppo
from prefect_rlhf.flows.view.forms import Form, title_of
from prefect_rlhf.rlhf_tasks.algorithms.grpo import GRPOConfig
from prefect_rlhf.rlhf_tasks.algorithms.ppo import PPOConfig
from prefect_rlhf.rlhf_tasks.algorithms.registry import OURS, algorithm, algorithm_names
from prefect_rlhf.rlhf_tasks.algorithms.sft import SFTConfig
from prefect_rlhf.rlhf_tasks.config.base import Groups
from prefect_rlhf.rlhf_tasks.config.models import ActorOnly
from prefect_rlhf.rlhf_tasks.config.training import TrainingConfig

FLOWS = [rlhf_ppo, grpo, sft, reward_model, rollout, plan]
SFT = {"models": {"actor": "m"}, "data": {"train": "d"}, "total_iterations": 1}


def fields_of(flow, definition: str) -> dict:
    """The fields of a definition in a flow's schema, in the order of the form."""
    fields = flow.parameters.model_dump()["definitions"][definition]["properties"]
    return dict(sorted(fields.items(), key=lambda item: item[1]["position"]))


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
def test_no_form_has_what_a_ui_cannot_draw_or_a_class_name(flow):
    schema = flow.parameters.model_dump()
    text = json.dumps(schema)
    assert "oneOf" not in text  # version 1 shows a box for JSON
    for name, definition in schema["definitions"].items():
        assert definition["title"] != name or name in ("Number", "Correction")  # a word is its own title
        for field in definition["properties"].values():
            assert {"title", "position"} <= set(field)


def test_every_field_of_every_configuration_has_its_group():
    for record in (record for record in map(algorithm, algorithm_names()) if record.package == OURS):
        groups = record.config.model_json_schema()["groups"]
        names = [name for listed in groups.values() for name in listed]
        assert sorted(names) == sorted(record.config.model_fields), record.config


def test_a_foreign_algorithm_has_groups_of_its_own():
    """And a field that it puts in none is asked first where it is required, else after all groups of algorithms."""

    class ForeignConfig(TrainingConfig):
        type: Literal["foreign"] = "foreign"
        models: ActorOnly
        beta: float = Field(default=0.1, description="A factor.")
        spare: int = Field(default=1, description="Another.")
        needed: int = Field(description="Without default.")
        groups: ClassVar[Groups] = {"Margin": ("beta",)}

    schema = TypeAdapter(Annotated[ForeignConfig, Form()]).json_schema()["properties"]
    assert schema["Run options"]["title"] == "Run"
    titles = {name: schema[name]["title"] for name in ("beta", "spare", "needed")}
    assert titles == {"beta": "Margin: beta", "spare": "Further: spare", "needed": "Needed"}
    by_place = sorted(schema, key=lambda name: schema[name]["position"])
    assert by_place[:4] == ["models", "data", "total_iterations", "needed"]
    asked = [by_place.index(name) for name in ("optimizer", "beta", "spare", "Run options", "type")]
    assert asked == sorted(asked)


def test_what_a_run_needs_is_asked_first():
    fields = list(fields_of(rlhf_ppo, "PPOConfig"))
    assert fields[:5] == ["models", "data", "total_iterations", "sampling", "rewards"]
    assert fields[-1] == "type"
    assert next(iter(fields_of(rlhf_ppo, "ModelsConfig"))) == "actor"


def test_the_form_of_ppo_says_at_its_top_that_the_demo_runs_without_a_configuration():
    config = rlhf_ppo.parameters.model_dump()["properties"]["config"]
    assert config["position"] == 0
    assert "Without one the demo runs" in config["description"]
    assert [option.get("title") for option in config["anyOf"]] == [None, "The demo"]


def test_sections_are_closed_and_optional_figures_are_boxes():
    fields = fields_of(rlhf_ppo, "PPOConfig")
    assert [option.get("title") for option in fields["optimizer"]["anyOf"]] == ["Change", "Default"]
    assert fields["optimizer"]["default"] is None
    group = fields["KL options"]["anyOf"]
    assert [option["title"] for option in group] == ["Change", "Default"]
    assert group[0]["properties"]["kl_target"]["type"] == "number"
    assert "default" not in group[0]["properties"]["kl_target"]


def test_a_form_asks_for_few_things_at_once_and_what_is_in_closed_groups_reaches_the_configuration():
    for flow, definition in ((rlhf_ppo, "PPOConfig"), (grpo, "GRPOConfig")):
        assert len(fields_of(flow, definition)) < 30
    form = TypeAdapter(Annotated[SFTConfig, Form()])
    flat = SFTConfig.model_validate({**SFT, "name": "mine", "seed": 3})
    assert (
        form.validate_python({**SFT, "Run options": {"name": "mine", "seed": 3}, "Execution options": None})
        == flat
    )
    assert form.validate_python({**SFT, "name": "mine", "seed": 3}) == flat
    with pytest.raises(ValidationError, match="sead"):
        form.validate_python({**SFT, "Run options": {"sead": 3}})


def test_a_server_takes_a_configuration_with_and_without_groups_and_no_unknown_key():
    schema = grpo.parameters.model_dump()
    checked = Draft202012Validator({**schema, "$defs": schema["definitions"]})
    config = {
        "models": {"actor": "m"},
        "data": {"train": "d"},
        "total_iterations": 1,
        "rewards": [{"function": "m:f"}],
    }
    config["sampling"] = {"max_completion_length": 8}
    assert checked.is_valid({"config": {**config, "epsilon": 0.1}})
    assert checked.is_valid({"config": {**config, "Loss options": {"epsilon": 0.1}}})
    assert not checked.is_valid({"config": {**config, "epsilom": 0.1}})
    assert not checked.is_valid({"config": {**config, "Loss options": {"epsilom": 0.1}}})


def test_prefect_takes_a_whole_configuration_with_all_its_defaults():
    shared = {"models": {"actor": "m"}, "data": {"train": "d"}, "rewards": [{"function": "m:f"}]}
    sampling = {"max_completion_length": 8}
    config = GRPOConfig(**shared, sampling=sampling, total_iterations=1, num_generations=2)
    fields = config.model_dump(mode="json")
    fields["Tools options"] = {"tool_format": fields.pop("tool_format")}  # a choice that is not made
    whole = {"config": fields}
    assert validate(whole, grpo.parameters.model_dump(), allow_none_with_default=True) == []


def test_a_closed_section_is_the_default_one_and_an_empty_figure_none():
    closed = {"optimizer": None, "cluster": None, "planning": None, "name": None}
    assert SFTConfig.model_validate({**SFT, **closed}) == SFTConfig.model_validate(SFT)
    with pytest.raises(ValidationError, match="models"):
        SFTConfig.model_validate({**SFT, "models": None})


@pytest.mark.parametrize(
    ("name", "group", "title"),
    [
        ("kl_coef", "KL", "KL: coefficient"),
        ("kl_coef", "", "KL coefficient"),
        ("batch_size", "Batch", "Batch: size"),
        ("n_hosts", "", "Number of hosts"),
        ("time_limit_s", "", "Time limit (s)"),
        ("RewardModelScore", "", "Reward model score"),
        ("PPO", "", "PPO"),
    ],
)
def test_titles_are_words(name, group, title):
    assert title_of(name, group) == title


def test_configurations_as_such_have_the_schema_that_they_had():
    """Only forms are arranged."""
    assert "position" not in json.dumps(PPOConfig.model_json_schema())
