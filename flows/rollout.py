"""Flow `rollout`."""

from typing import Any

from prefect import flow
from prefect.states import State

from flows.orders import start_again
from flows.runs import carry_out, flow_run_name
from rlhf_tasks.config import RolloutConfig


@flow(name="rollout", flow_run_name=flow_run_name, persist_result=False, on_crashed=[start_again])
async def rollout(config: RolloutConfig, run_folder: str | None = None) -> dict[str, Any] | State[Any]:
    """Samples from a model, scored and written as JSONL into the run folder.

    config      the run's configuration
    run_folder  an existing run folder to go on in; its configuration counts then, apart from `cluster`
    Returns the run's summary; of one that is cancelled, that state.
    """
    return await carry_out("rollout", config, run_folder)
