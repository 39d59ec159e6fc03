"""A run's requests to Prefect's API, which may fail, be late or be left out, but never block the run.

Among them is an event for each commit, which automations can react to: `prefect-rlhf.iteration.committed` of the
resource `prefect-rlhf.run.NAME`. Its related resources are the flow run, and its flow, deployment and tags. Its
payload has `run`, `iteration`, `step` and `metrics`, the row of `metrics.jsonl`.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from httpx import HTTPError, HTTPStatusError, Response
from prefect.client.orchestration import PrefectClient, get_client
from prefect.context import FlowRunContext, SettingsContext, get_settings_context
from prefect.events import Event, RelatedResource, Resource
from prefect.events.related import related_resources_from_run_context
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

T = TypeVar("T")

ANSWER_S = 15.0  # time limit of one request; a server usually needs milliseconds, a busy one seconds
GREETING_S = 3.0
PAUSE_S = 5.0  # after a failure nothing is sent for this long; twice as long after each further failure
LONGEST_PAUSE_S = 60.0
COMPLETE_S = 60.0  # most time for what is still to be shown after the run's end
GIVE_UP_S = (
    45.0  # most time of an outage that is waited for then: a busy machine's restart of our own takes 20 s
)
BUSY = {408, 429, 502, 503}  # the server asks to try again, e.g. because SQLite's lock is taken
BUSY_PAUSE_S = 0.05  # before it is asked again; twice as long each time
LONGEST_BUSY_PAUSE_S = 0.4
NO_LOGIN = {401, 403}  # the login is refused, so every other request would be refused too

COMMITTED = "prefect-rlhf.iteration.committed"
EVENTS_AT_ONCE = 100  # events per request
MOST_EVENTS = 1000  # unsent events that are kept; older ones are dropped, and counted as left out

logger = logging.getLogger(__name__)


class Away(Exception):
    """The server has not answered in time, or was not asked because of an earlier failure."""


class Refused(Exception):
    """The server answers, but refuses the request, e.g. because its object was deleted. Do not try it again."""


def is_prefects(error: Exception) -> bool:
    """Whether an error comes from Prefect's server: it does not answer, refuses, or has lost the flow run.

    Before a flow run begins, Prefect's engine raises a RuntimeError for that.
    """
    return isinstance(error, HTTPError | ObjectNotFound) or str(error).startswith("Failed to reach API at")


@contextmanager
def of_flow_around() -> Iterator[None]:
    """Inside a flow without PREFECT_API_URL, for which Prefect has started a server: gives that server to all that
    asks for the setting."""
    if FlowRunContext.get() is None or PREFECT_API_URL.value():
        yield
        return
    with get_client(sync_client=True) as client:
        api_url = str(client.api_url)
    with temporary_settings({PREFECT_API_URL: api_url}):
        yield


def what_is_wrong(error: Exception) -> str:
    """The predicate of a sentence about Prefect's server: what is wrong with it, by its error."""
    if isinstance(error, ObjectNotFound):
        return "does not know the flow run any more"
    if _status(error) in NO_LOGIN:
        return f"refuses the login ({error})"
    return f"{'refuses what it is asked for' if _is_refusal(error) else 'does not answer'} ({error})"


def prompt_client() -> PrefectClient:
    """A client that passes on a busy server's answer at once.

    After such an answer Prefect's own client sleeps for two seconds, even if it does not ask again.
    """
    return get_client(httpx_settings={"event_hooks": {"response": [_raise_if_busy]}})


async def _raise_if_busy(response: Response) -> None:
    if response.status_code in BUSY:
        raise HTTPStatusError("the server is busy", request=response.request, response=response)


class PrefectApi:
    """A circuit breaker: after a failure nothing is sent to the server for a while. An outage is logged once.

    run      the run's name, for the log
    skipped  number of requests that were left out, because the server was away or refused them
    unshown  names of subflows that Prefect does not show, or not with their end
    away_s   seconds in which the server was away
    """

    def __init__(self, run: str) -> None:
        self.skipped = 0
        self.unshown: list[str] = []
        self._run = run
        self._away_since: float | None = None
        self._away_before_s = 0.0
        self._next_try = 0.0
        self._pause_s = PAUSE_S
        # Made only once, because making the settings takes Prefect 50 ms.
        found = get_settings_context()
        impatient = found.settings.copy_with_update({PREFECT_CLIENT_MAX_RETRIES: 0})
        self._settings = found.profile, impatient

    @property
    def away_s(self) -> float:
        """Seconds without an answer so far, in this and all earlier outages."""
        return self._away_before_s + self.outage_s

    @property
    def outage_s(self) -> float:
        """Seconds since the first failure of the current outage; 0 when the server answers."""
        return 0.0 if self._away_since is None else time.monotonic() - self._away_since

    @property
    def wait_s(self) -> float:
        """Seconds until the next request may be sent."""
        return max(0.0, self._next_try - time.monotonic())

    async def part(self) -> None:
        """Call it last in a flow. If the server is away, Prefect's engine then reports the flow's end only once,
        instead of trying for minutes with nothing left to do. A flow inside another one keeps trying, since work
        follows it.
        """
        profile, settings = self._settings
        try:
            async with asyncio.timeout(GREETING_S):
                with SettingsContext(profile=profile, settings=settings):
                    async with get_client() as client:
                        await client.hello()
        except (HTTPError, PrefectException, OSError, TimeoutError):
            if not flow_run.parent_flow_run_id:
                # Not left again: it is for the rest of the flow's context.
                SettingsContext(profile=profile, settings=settings).__enter__()

    def missing(self) -> dict[str, object]:
        """The part of the run that Prefect does not show, for the summary; empty if the server was never away."""
        if not (self.skipped or self.unshown or self.away_s):
            return {}
        return {"away_s": round(self.away_s, 1), "left_out": self.skipped, "subflows_not_shown": self.unshown}

    async def show(self, work: Callable[[], Awaitable[T]], limit_s: float | None = None) -> T | None:
        """Do work that may be left out, within `limit_s` seconds. Returns None if it was left out."""
        with suppress(Away, Refused):
            return await self.ask(work, limit_s)
        self.skipped += 1
        return None

    async def ask(self, work: Callable[[], Awaitable[T]], limit_s: float | None = None) -> T:
        """Do work within `limit_s` seconds (None: `ANSWER_S`).

        Raises Refused, or Away; during the pause after a failure it raises Away at once.
        """
        limit_s = ANSWER_S if limit_s is None else limit_s
        if self.wait_s > 0:
            raise Away(f"no answer for {self.outage_s:.0f} s")
        try:
            profile, settings = self._settings
            async with asyncio.timeout(limit_s):
                with SettingsContext(profile=profile, settings=settings):
                    answer = await _patiently(work)
        except (HTTPError, PrefectException, OSError, TimeoutError) as error:
            if not _is_refusal(error):
                raise self._failed(error, limit_s) from None
            self._answered()
            raise Refused(str(error)) from None
        self._answered()
        return answer

    def _failed(self, error: Exception, limit_s: float) -> Away:
        reason = f"{type(error).__name__}: {error}" if str(error) else f"no answer in {limit_s:g} s"
        if self._away_since is None:
            self._away_since = time.monotonic()
            self._pause_s = PAUSE_S
            logger.warning(
                "run %s continues without the Prefect server, until it answers again: %s", self._run, reason
            )
        self._next_try = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return Away(reason)

    def _answered(self) -> None:
        if self._away_since is not None:
            logger.warning("the Prefect server answers again, after %.0f s", self.outage_s)
            self._away_before_s += self.outage_s
            self._away_since = None


def _status(error: Exception) -> int:
    """The HTTP status of a server's answer; 0 without an answer."""
    found = getattr(error, "http_exc", error)  # Prefect's client wraps the errors of some answers
    return found.response.status_code if isinstance(found, HTTPStatusError) else 0


def _is_refusal(error: Exception) -> bool:
    """Whether the server refuses the request itself: not because it is busy, and not because of the login."""
    status = _status(error)
    return 400 <= status < 500 and status not in BUSY | NO_LOGIN


async def _patiently(work: Callable[[], Awaitable[T]]) -> T:
    """Repeat a request to a busy server soon. Prefect's own client would wait for 2, 4, 8, 16 and 32 seconds."""
    pause_s = BUSY_PAUSE_S
    while True:
        try:
            return await work()
        except HTTPStatusError as error:
            if error.response.status_code not in BUSY:
                raise
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_BUSY_PAUSE_S)


async def send_event(event: str, resource: str, payload: Mapping[str, Any]) -> None:
    """Send an event of the current flow run, with one request.

    resource  its id; what stands after its last dot is its name
    """
    name = resource.rpartition(".")[2]
    async with prompt_client() as client:
        related = await related_resources_from_run_context(client)
        of = Resource({"prefect.resource.id": resource, "prefect.resource.name": name})
        made = Event(event=event, resource=of, related=related, payload=dict(payload))
        await client.request("POST", "/events", json=[made.model_dump(mode="json")])


class CommitEvents:
    """Sends a run's commits to the Prefect server, in order. Used inside a flow.

    `prefect.events.emit_event` is not used, because it tries for eight seconds with each event, even at process exit.
    """

    def __init__(self, run: str, api: PrefectApi) -> None:
        self._run, self._api = run, api
        self._due: deque[Event] = deque()
        self._related: list[RelatedResource] | None = None

    def tell(self, iteration: int, metrics: Mapping[str, float | None]) -> None:
        """Queue the event of a committed iteration, for `send`."""
        resource = {
            "prefect.resource.id": f"prefect-rlhf.run.{self._run}",
            "prefect.resource.name": self._run,
        }
        payload: dict[str, Any] = {"run": self._run, "iteration": iteration, "step": iteration + 1}
        payload["metrics"] = dict(metrics)
        self._due.append(Event(event=COMMITTED, resource=Resource(resource), payload=payload))
        while len(self._due) > MOST_EVENTS:
            self._due.popleft()
            self._api.skipped += 1

    @property
    def due(self) -> int:
        """Number of events that the server has not confirmed."""
        return len(self._due)

    async def send(self) -> None:
        """Send the queued events. Raises Away; events that the server has not confirmed stay in the queue."""
        while self._due:
            batch = [self._due.popleft() for _ in range(min(EVENTS_AT_ONCE, len(self._due)))]
            try:
                await self._api.ask(partial(self._request, batch))
            except Refused:
                self._api.skipped += len(batch)
            except (Away, asyncio.CancelledError):
                self._due.extendleft(reversed(batch))
                raise

    def give_up(self) -> None:
        """Drop the queued events at the end of the run."""
        self._api.skipped += len(self._due)
        self._due.clear()

    async def _request(self, batch: list[Event]) -> None:
        async with prompt_client() as client:
            if self._related is None:
                self._related = await related_resources_from_run_context(client)
            events = [event.model_copy(update={"related": self._related}) for event in batch]
            await client.request("POST", "/events", json=[event.model_dump(mode="json") for event in events])
