"""Flow `reward-model`."""

from typing import Any

from prefect import flow
from prefect.states import State

from flows.orders import start_again
from flows.runs import carry_out, flow_run_name
from rlhf_tasks.config import RewardModelConfig


@flow(name="reward-model", flow_run_name=flow_run_name, persist_result=False, on_crashed=[start_again])
async def reward_model(
    config: RewardModelConfig, run_folder: str | None = None
) -> dict[str, Any] | State[Any]:
    """A reward model from preference pairs.

    config      the run's configuration
    run_folder  an existing run folder to go on in; its configuration counts then, apart from `cluster`
    Returns the run's summary; of one that is cancelled, that state.
    """
    return await carry_out("reward_model", config, run_folder)
