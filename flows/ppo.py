"""Flow `rlhf-ppo`."""

from typing import Any

from prefect import flow

from flows.runs import carry_out, flow_run_name
from rlhf_tasks.config import PPOConfig


@flow(name="rlhf-ppo", flow_run_name=flow_run_name, persist_result=False)
async def rlhf_ppo(config: PPOConfig, run_folder: str | None = None) -> dict[str, Any]:
    """Proximal policy optimisation: six model function calls per iteration.

    config      the run's configuration
    run_folder  an existing run folder to go on in; its configuration counts then
    Returns the run's summary.
    """
    return await carry_out(config, run_folder)
