"""The deployments on a real server with a real process worker, as their owner has them. Import as
`tests.deployments.deployed`."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.client.schemas.objects import FlowRun, State

from prefect_rlhf.flows.cluster.server import PrefectServer, own_server

ROOT = Path(__file__).parents[2]
PREFECT_FILE = ROOT / "deployments" / "prefect.yaml"
AUTOMATIONS = PREFECT_FILE.with_name("automations.yaml")


class Deployed:
    """The project's deployments, and a worker that carries their flow runs out."""

    def __init__(self, folder: Path, server: PrefectServer) -> None:
        self.folder, self.server = folder, server
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")},
            **server.environment,
            "PREFECT_HOME": str(folder / "client"),
            "PYTHONPATH": str(ROOT),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "OMP_NUM_THREADS": "1",
        }

    def prefect(self, *arguments: str) -> None:
        """A command of Prefect's, to its good end."""
        command = [sys.executable, "-m", "prefect", *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"

    @contextmanager
    def worker(self) -> Iterator[None]:
        """`prefect worker start`, ended with its children as a terminal would end it."""
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "rlhf-local"]
        with (self.folder / "worker.log").open("a") as log:
            worker = subprocess.Popen(
                command, cwd=ROOT, env=self.environment, start_new_session=True, stdout=log, stderr=log
            )
        try:
            yield
        finally:
            os.killpg(worker.pid, signal.SIGTERM)
            try:
                worker.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()

    def start(self, deployment: str, config: Mapping[str, Any]) -> "DeployedRun":
        """A flow run of a deployment."""

        async def create() -> FlowRun:
            async with get_client() as client:
                found = await client.read_deployment_by_name(deployment)
                return await client.create_flow_run_from_deployment(found.id, parameters={"config": config})

        return DeployedRun(asyncio.run(create()))


class DeployedRun:
    """A flow run of a deployment, as those see it who watch and order it about."""

    def __init__(self, run: FlowRun) -> None:
        self.id = run.id

    def read(self) -> FlowRun:
        """As the server has it now."""

        async def read() -> FlowRun:
            async with get_client() as client:
                return await client.read_flow_run(self.id)

        return asyncio.run(read())

    def states(self) -> list[State[Any]]:
        """All that it has had, the oldest first."""

        async def read() -> list[State[Any]]:
            async with get_client() as client:
                return await client.read_flow_run_states(self.id)

        return asyncio.run(read())

    def set_state(self, **state: Any) -> None:
        """As the UI sets it."""

        async def send() -> None:
            async with get_client() as client:
                await client.request(
                    "POST", "/flow_runs/{id}/set_state", path_params={"id": self.id}, json={"state": state}
                )

        asyncio.run(send())

    def resume(self) -> None:
        """As the UI does it."""

        async def send() -> None:
            async with get_client() as client:
                await client.resume_flow_run(self.id)

        asyncio.run(send())

    def subflows(self) -> list[FlowRun]:
        """Its iterations."""

        async def read() -> list[FlowRun]:
            mine = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[self.id]))
            async with get_client() as client:
                return await client.read_flow_runs(flow_run_filter=mine)

        return asyncio.run(read())

    def wait(self, *names: str, seconds: float = 400.0, message: str = "") -> State[Any]:
        """Until its state has one of these names, and a message with these words."""

        def reached() -> State[Any] | None:
            state = self.read().state
            assert state is not None
            if state.name in names and message in (state.message or ""):
                return state
            assert not state.is_final() or state.name in ("Crashed", "Cancelled"), (state.name, state.message)
            return None

        return wait_for(reached, seconds)

    @property
    def process(self) -> psutil.Process:
        """Of the flow."""
        pid = self.read().infrastructure_pid
        assert pid is not None
        return psutil.Process(int(pid.rsplit(":", 1)[-1]))


def wait_for(reached: Callable[[], Any], seconds: float = 400.0) -> Any:
    """What a function gives as soon as it gives something."""
    deadline = time.monotonic() + seconds
    while True:
        found = reached()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.3)


@contextmanager
def deployed(folder: Path) -> Iterator[Deployed]:
    """Server, work pool, deployments and automations."""
    with own_server(folder) as server:
        place = Deployed(folder, server)
        place.prefect("work-pool", "create", "rlhf-local", "--type", "process")
        place.prefect("--no-prompt", "deploy", "--all", "--prefect-file", str(PREFECT_FILE.relative_to(ROOT)))
        place.prefect("automation", "create", "--from-file", str(AUTOMATIONS.relative_to(ROOT)))
        yield place
