"""Flow `sft`."""

from typing import Any

from prefect import flow

from flows.runs import carry_out, flow_run_name
from rlhf_tasks.config import SFTConfig


@flow(name="sft", flow_run_name=flow_run_name, persist_result=False)
async def sft(config: SFTConfig, run_folder: str | None = None) -> dict[str, Any]:
    """Supervised fine-tuning on completion tokens.

    config      the run's configuration
    run_folder  an existing run folder to go on in; its configuration counts then, apart from `cluster`
    Returns the run's summary.
    """
    return await carry_out("sft", config, run_folder)
