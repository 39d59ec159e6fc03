"""The flow that is made of an algorithm's record."""

from pathlib import Path

import pytest
from prefect.flows import load_flow_from_entrypoint

from prefect_rlhf.flows.algorithms import flow_of, sft
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm, algorithm_names
from tests.rlhf_tasks.algorithms.registered import FILES, install, installed

FLOWS = Path(__file__).parents[2] / "flows" / "algorithms.py"


@pytest.mark.parametrize("name", algorithm_names())
def test_every_algorithm_has_a_flow_of_its_configuration(name):
    made = flow_of(name)
    assert made.name == name.replace("_", "-")
    assert made.parameters.required == ["config"]
    assert list(made.parameters.properties) == ["config", "run_folder"]
    assert algorithm(name).config.__name__ in made.parameters.definitions
    assert made.description is not None
    assert made.description.startswith(str(algorithm(name).config.__doc__).splitlines()[0])


@pytest.mark.parametrize("name", ["sft", "reward_model", "rollout"])
def test_prefect_loads_it_from_an_entry_point(name):
    loaded = load_flow_from_entrypoint(f"{FLOWS}:{name}")
    assert loaded.name == name.replace("_", "-")
    assert loaded.parameters.required == ["config"]


def test_there_is_one_flow_of_an_algorithm():
    assert flow_of("sft") is sft


def test_an_algorithm_of_another_package_has_one(tmp_path):
    install(tmp_path, "tuned-models", {"tuned": "tuned:ALGORITHM"}, FILES)
    with installed(tmp_path):
        assert "TunedConfig" in flow_of("tuned").parameters.definitions


def test_an_unknown_algorithm_has_none():
    with pytest.raises(ConfigError, match=r"there is no algorithm 'orpo'; registered are ppo, grpo, sft"):
        flow_of("orpo")
