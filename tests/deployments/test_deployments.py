"""The deployments as their owner uses them: Prefect's own commands, a real server, a real process worker."""

import json
import sys

import pytest
import yaml

from tests.deployments.deployed import AUTOMATIONS, PREFECT_FILE, ROOT, deployed
from tests.tiny_runs import ppo_config


def test_every_deployment_names_a_flow_that_is_there():
    import importlib

    named = {}
    for deployment in yaml.safe_load(PREFECT_FILE.read_text())["deployments"]:
        path, _, function = deployment["entrypoint"].partition(":")
        flow = getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), function)
        named[f"{flow.name}/{deployment['name']}"] = deployment
        required = flow.parameters.required
        assert (not required) == ("parameters" in deployment), f"{flow.name} needs {required}"
        assert deployment["work_pool"] == {"name": "rlhf-local"}
        assert deployment["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}
    assert set(named) == {
        "rlhf-ppo/local",
        "rlhf-pipeline/run-pipeline",
        "rlhf-series/run-series",
        "grpo/train-grpo",
        "rloo/train-rloo",
        "remax/train-remax",
        "reinforce-pp/train-reinforce-pp",
        "expert-iteration/train-expert-iteration",
        "sft/fine-tune",
        "reward-model/train-reward-model",
        "dpo/train-dpo",
        "kto/train-kto",
        "distillation/distill",
        "plan/plan-only",
    }
    assert len({deployment["name"] for deployment in named.values()}) == len(named), (
        "lists show these names alone"
    )


def test_every_deployed_run_is_started_again_when_its_process_is_killed():
    """A plan alone has nothing to continue from; rollouts may be deployed by others."""
    import importlib

    deployed_flows = set()
    for deployment in yaml.safe_load(PREFECT_FILE.read_text())["deployments"]:
        path, _, function = deployment["entrypoint"].partition(":")
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        deployed_flows.add(getattr(module, function).name)
    (automation,) = yaml.safe_load(AUTOMATIONS.read_text())["automations"]
    (named,) = [
        related["prefect.resource.name"]
        for related in automation["trigger"]["match_related"]
        if related["prefect.resource.role"] == "flow"
    ]
    assert set(named) == deployed_flows - {"plan"} | {"rollout"}


def test_no_module_of_flows_hides_one_of_the_standard_library():
    """Prefect puts an entry point's folder first on the path: flows/profile.py broke torch's import."""
    modules = {path.stem for path in (ROOT / "flows").glob("*.py")} - {"__init__"}
    assert not modules & sys.stdlib_module_names


@pytest.mark.whole
@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_deployed_ppo_run_is_done_by_a_process_worker(tmp_path):
    config = ppo_config(tmp_path, total_iterations=2).model_dump(mode="json")
    with deployed(tmp_path) as place, place.worker():
        place.prefect(
            "deployment", "run", "rlhf-ppo/local", "--param", f"config={json.dumps(config)}", "--watch"
        )
    (run,) = (tmp_path / "runs").glob("ppo-*")
    assert json.loads((run / "summary.json").read_text())["iterations"] == 2
    assert (run / "model" / "model.safetensors").exists()
