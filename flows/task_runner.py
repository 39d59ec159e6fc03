"""How a node's Prefect task reaches the controller's worker, at half of what it costs by default."""

from typing import Any

from distributed import Client, Future
from prefect_dask import DaskTaskRunner, PrefectDaskClient


class PlainSubmit(Client):
    """Below PrefectDaskClient: where the task, wrapped with its context, is handed to Dask."""

    controller: str
    ship_settings: bool

    def submit(self, func: Any, *args: Any, **kwargs: Any) -> Future:
        """Pin the task to the controller, and leave out the settings if the worker has them in its
        environment."""
        if not self.ship_settings:
            kwargs["context"]["settings_context"] = {}
        kwargs |= {"workers": [self.controller], "allow_other_workers": False}
        return super().submit(func, *args, **kwargs)


class ControllerClient(PrefectDaskClient, PlainSubmit):
    """A client whose tasks run on the controller."""

    def __init__(self, *args: Any, controller: str, ship_settings: bool, **kwargs: Any) -> None:
        self.controller = controller
        self.ship_settings = ship_settings
        super().__init__(*args, **kwargs)


class ControllerTaskRunner(DaskTaskRunner):
    """Runs tasks on the controller's worker.

    address        of the scheduler
    controller     address of the worker
    ship_settings  False when the worker's environment has PREFECT_API_URL and the login: rebuilding the
    settings for each task is more than half of its cost
    """

    def __init__(
        self,
        address: str,
        controller: str,
        ship_settings: bool,
        client_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(address=address, client_kwargs=client_kwargs)
        self.controller = controller
        self.ship_settings = ship_settings

    @property
    def client(self) -> PrefectDaskClient:
        """Connected at the first use, closed when the flow run ends."""
        if self._client is None:
            self._client = self._exit_stack.enter_context(
                ControllerClient(
                    self.address,
                    controller=self.controller,
                    ship_settings=self.ship_settings,
                    **self.client_kwargs,
                )
            )
        return self._client

    def duplicate(self) -> "ControllerTaskRunner":
        """A fresh one with the same settings, as each flow run needs it."""
        assert self.address is not None
        return ControllerTaskRunner(self.address, self.controller, self.ship_settings, self.client_kwargs)
