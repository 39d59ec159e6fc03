"""flows/run/orders.py: what Prefect shows of a run that a signal has ended."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[3]
PIPELINE = textwrap.dedent("""
    import asyncio, sys
    from prefect import flow
    from prefect_rlhf.flows.cluster.shutdown import ending_in_time
    from prefect_rlhf.flows.run.orders import Interrupted, cancelled_by_signals

    @flow(name="stage", flow_run_name=f"stage of {sys.argv[1]}", persist_result=False)
    async def stage():
        async with cancelled_by_signals(lambda: "at commit 3"):
            print("READY", flush=True)
            await asyncio.sleep(600)

    @flow(name="pipeline", flow_run_name=f"pipeline of {sys.argv[1]}", persist_result=False)
    async def pipeline():
        async with cancelled_by_signals(lambda: "between two stages"):
            await stage()

    async def main():
        watch.run = asyncio.current_task()
        await pipeline()

    with ending_in_time() as watch:
        try:
            asyncio.run(main())
        except Interrupted as ended:
            print("ended by", ended.number.name, flush=True)
""")


async def states_of(name: str) -> list[list[tuple[str | None, str | None]]]:
    """(name, message) of the states of each flow run that bears that name, the newest last."""
    wanted = FlowRunFilter(name=FlowRunFilterName(like_=name))
    async with get_client() as client:
        runs = await client.read_flow_runs(flow_run_filter=wanted)
        histories = [await client.read_flow_run_states(run.id) for run in runs]
    ordered = [sorted(states, key=lambda state: state.timestamp) for states in histories]
    return [[(state.name, state.message) for state in states] for states in ordered]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGINT, "ended by Ctrl-C"), (signal.SIGTERM, "ended by SIGTERM")]
)
def test_a_run_that_a_signal_ends_is_cancelled_at_its_commit_and_so_is_its_pipeline(prefect, number, words):
    environment = {**os.environ, **prefect.environment, "PYTHONPATH": str(ROOT)}
    mark = f"{number.name}-{os.getpid()}"
    command = [sys.executable, "-c", PIPELINE, mark]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None
            assert run.stdout.readline() == "READY\n"
            run.send_signal(number)
            said, _ = run.communicate(timeout=300)
        finally:
            run.kill()
    assert said == f"ended by {number.name}\n"
    histories = asyncio.run(states_of(mark))
    assert len(histories) == 2
    for states in histories:
        assert states[-1] == ("Cancelled", f"at commit 3; {words}")
        assert not any(name == "Crashed" for name, _ in states)
