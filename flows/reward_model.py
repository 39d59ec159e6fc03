"""Flow `reward-model`."""

from typing import Annotated, Any

from prefect import flow
from prefect.states import State

from flows.run.runs import carry_out, flow_run_name
from flows.view.forms import Form
from rlhf_tasks.algorithms.configurations import RewardModelConfig


@flow(name="reward-model", flow_run_name=flow_run_name, persist_result=False)
async def reward_model(
    config: Annotated[RewardModelConfig, Form()], run_folder: str | None = None
) -> dict[str, Any] | State[Any]:
    """A reward model from preference pairs.

    Returns the run's summary; of a run that is cancelled, that state.

    Args:
        config: The run's configuration, as in a YAML file.
        run_folder: An existing run folder to go on in; its configuration counts then, apart from its cluster.
    """
    return await carry_out("reward_model", config, run_folder)
