"""Flow `rlhf-ppo`."""

from pathlib import Path
from typing import Annotated, Any

from prefect import flow
from prefect.states import State

from prefect_rlhf.flows.pipeline import demo_at, make_models
from prefect_rlhf.flows.run.orders import cancelled_by_signals
from prefect_rlhf.flows.run.runs import carry_out, flow_run_name
from prefect_rlhf.flows.view.forms import Form
from prefect_rlhf.rlhf_tasks.algorithms.ppo import PPOConfig

RUNS = Path("runs")  # in the folder that the flow runs in


@flow(name="rlhf-ppo", flow_run_name=flow_run_name, persist_result=False)
async def rlhf_ppo(
    config: Annotated[PPOConfig | None, Form(none="The demo")] = None,
    run_folder: str | None = None,
) -> dict[str, Any] | State[Any]:
    """Proximal policy optimisation: six model function calls per iteration.

    Returns the run's summary, or the Cancelled state of a run that was cancelled.

    Args:
        config: The run's configuration, as in a YAML file. Without one the demo runs, with the models in runs/demo,
            which are trained first where they are missing.
        run_folder: An existing run folder to resume; its configuration is then used, except for the cluster.
    """
    if config is not None or run_folder is not None:
        return await carry_out("ppo", config, run_folder)
    async with cancelled_by_signals(lambda: "before PPO"):
        return await _demo()


async def _demo() -> dict[str, Any] | State[Any]:
    with demo_at(RUNS / "demo", seed=None) as demo:
        policy = await make_models(demo)
        fresh = policy.model_copy(update={"name": None, "output_dir": str(RUNS.resolve())})
        return await carry_out("ppo", fresh)
