"""How a node's Prefect task reaches the controller's worker, at half of what it costs by default."""

from typing import Any

from distributed import Client, Future
from prefect_dask import DaskTaskRunner, PrefectDaskClient


class PlainSubmit(Client):
    """Below PrefectDaskClient: where the task, wrapped with its context, is handed to Dask."""

    controller: str

    def submit(self, func: Any, *args: Any, **kwargs: Any) -> Future:
        """Pin the task to the controller, and leave out the settings, which that worker has in its environment."""
        kwargs["context"]["settings_context"] = {}
        kwargs |= {"workers": [self.controller], "allow_other_workers": False}
        return super().submit(func, *args, **kwargs)


class ControllerClient(PrefectDaskClient, PlainSubmit):
    """A client whose tasks run on the controller."""

    def __init__(self, *args: Any, controller: str, **kwargs: Any) -> None:
        self.controller = controller
        super().__init__(*args, **kwargs)


class ControllerTaskRunner(DaskTaskRunner):
    """Runs tasks on the controller's worker.

    address     of the scheduler
    controller  address of the worker

    Rebuilding the settings for each task would be more than half of its cost: the worker's environment must have
    PREFECT_API_URL and the login (`flows.cluster` sees to it).
    """

    def __init__(
        self,
        address: str,
        controller: str,
        client_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(address=address, client_kwargs=client_kwargs)
        self.controller = controller

    @property
    def client(self) -> PrefectDaskClient:
        """Connected at the first use, closed when the flow run ends."""
        if self._client is None:
            self._client = self._exit_stack.enter_context(
                ControllerClient(
                    self.address,
                    controller=self.controller,
                    **self.client_kwargs,
                )
            )
        return self._client

    def duplicate(self) -> "ControllerTaskRunner":
        """A fresh one with the same settings, as each flow run needs it."""
        assert self.address is not None
        return ControllerTaskRunner(self.address, self.controller, self.client_kwargs)
