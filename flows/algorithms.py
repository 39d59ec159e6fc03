"""The flow of every algorithm, made from its record. Each is an entry point of a deployment; PPO's is in ppo.py."""

from functools import cache
from inspect import getdoc
from typing import Annotated, Any

from prefect import Flow, flow
from prefect.states import State

from prefect_rlhf.flows.run.runs import carry_out, flow_run_name
from prefect_rlhf.flows.view.forms import Form
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm

_DOCUMENTATION = """{}

Returns the run's summary, or the Cancelled state of a run that was cancelled.

Args:
    config: The run's configuration, as in a YAML file.
    run_folder: An existing run folder to resume; its configuration is then used, except for the cluster.
"""


@cache
def flow_of(name: str) -> Flow[..., Any]:
    """The flow that runs an algorithm. Its name is the algorithm's, with hyphens.

    Raises ConfigError for an unknown algorithm.
    """
    record = algorithm(name)

    async def run(config: Any, run_folder: str | None = None) -> dict[str, Any] | State[Any]:
        return await carry_out(name, config, run_folder)

    run.__name__ = name
    run.__doc__ = _DOCUMENTATION.format(getdoc(record.config))
    run.__annotations__["config"] = Annotated[record.config, Form()]
    return flow(name=name.replace("_", "-"), flow_run_name=flow_run_name, persist_result=False)(run)


dpo = flow_of("dpo")
kto = flow_of("kto")
grpo = flow_of("grpo")
rloo = flow_of("rloo")
remax = flow_of("remax")
reinforce_pp = flow_of("reinforce_pp")
expert_iteration = flow_of("expert_iteration")
distillation = flow_of("distillation")
sft = flow_of("sft")
reward_model = flow_of("reward_model")
rollout = flow_of("rollout")
evaluate = flow_of("evaluate")
