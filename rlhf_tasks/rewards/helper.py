"""The main loop of the process that runs a user's Python rewards: read requests, call rewards, reply.

Requests come on standard input; replies leave on the original standard output. Each is one line of JSON. The first
request has the rewards and the values of the Prefect blocks that their arguments name; its reply is `{"pid": ...}`.
The replies to a further request are `{"at": [reward, place]}` before each call, and then

- `{"values": ..., "split": ..., "logged": ...}`; `split` names the rewards of which only a part of the
  answers was judged;
- or `{"fault": ..., "traceback": ..., "place": ..., "searching": ...}`. After a fault the process ends. Where
  `searching` is true, it first searches for the answer that the reward fails on and replies `{"place": ...}`.
"""

import asyncio
import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rlhf_tasks.rewards.forms import (
    Answers,
    Reward,
    RewardError,
    TrainerState,
    Values,
    load_reward,
    shortened,
)
from rlhf_tasks.rewards.kept_values import KeptValues, code_digest, key_of
from rlhf_tasks.rewards.remote import Service
from rlhf_tasks.rewards.user_code import at_line, secret_named, traced, users_frames

STACK_SIGNAL = signal.SIGRTMAX  # makes this process dump its stack, whatever it is doing
MARGIN_S = 0.5  # async rewards time out this much before the process does, so that the late one can be named
MOST_MESSAGE, MOST_TRACEBACK = 400, 8000  # characters


def serve() -> None:
    """Answer requests until a reward fails. sys.argv[2] is the descriptor of the file to dump stacks to."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # a reward may read its input
    os.dup2(2, 1)  # or print: neither may mix with requests and replies
    stacks = int(sys.argv[2])
    faulthandler.enable(stacks, all_threads=False)
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=False)
    start = json.loads(requests.readline())
    folder = start["kept"] and Path(start["kept"])
    kept = KeptValues(folder, start["writer"])
    helper = Helper(replies, [_Entry(**entry) for entry in start["rewards"]], start["blocks"], kept)
    try:
        helper.load()
        for request in requests:
            helper.answer(json.loads(request))
    except RewardError as error:
        helper.tell_fault(error)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A reward, as given in the configuration.

    kwargs   of a service: its headers
    service  the other settings of a service; None for a function
    """

    name: str
    location: str
    kwargs: Mapping[str, Any]
    service: Mapping[str, Any] | None
    concurrency: int
    cache: bool


@dataclass(slots=True)
class _Call:
    """One call of a reward. places: indices of the answers that it judges."""

    reward: Reward
    places: Sequence[int]
    returned: Any = None

    @property
    def place(self) -> int | None:
        """The index of the one answer that it judges; None where it judges several."""
        return self.places[0] if self.reward.form.per_answer else None


@dataclass(frozen=True, slots=True)
class _Task:
    """What this process does of one reward for a request.

    places  indices of the answers that it gives values for
    keys    place -> key of its value where values are kept
    known   place -> value, as kept
    """

    entry: _Entry
    reward: Reward
    places: Sequence[int]
    keys: Mapping[int, str]
    known: Mapping[int, float | None]

    @property
    def todo(self) -> list[int]:
        """The places that are still to be judged."""
        return [place for place in self.places if place not in self.known]


class Helper:
    """The rewards of one helper process.

    blocks  name of a Prefect Secret block -> its value
    """

    def __init__(
        self, replies: Any, settings: Sequence[_Entry], blocks: Mapping[str, str], kept: KeptValues
    ) -> None:
        self._replies, self._settings, self._kept = replies, settings, kept
        self._pid = os.getpid()
        self._kwargs = [
            {name: _resolved(value, blocks) for name, value in entry.kwargs.items()} for entry in settings
        ]
        self._secrets = {
            shown
            for entry, kwargs in zip(settings, self._kwargs, strict=True)
            for name, value in kwargs.items()
            if value and secret_named(entry.kwargs[name])
            for shown in _shown(str(value))
        }
        self._rewards: list[Reward] = []
        self._loop = asyncio.Runner()  # one for all requests: an async reward may keep a connection open
        if self._secrets:
            sys.stdout, sys.stderr = (_Scrubbed(s, self.scrubbed) for s in (sys.stdout, sys.stderr))

    def scrubbed(self, text: str) -> str:
        """A text with `***` in place of the secrets' values."""
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text

    def load(self) -> None:
        """Find every reward. Raises RewardError."""
        self._tell({"pid": self._pid})
        for entry, kwargs in zip(self._settings, self._kwargs, strict=True):
            for name, value in kwargs.items():
                _refuse_unknown(entry, name, value)
            if entry.service is not None:
                service = Service(
                    entry.name, entry.location, kwargs, concurrency=entry.concurrency, **entry.service
                )
                self._rewards.append(service.reward())
                continue
            try:
                self._rewards.append(load_reward(entry.name, entry.location, kwargs))
            except RewardError:
                raise
            except BaseException as error:  # noqa: BLE001  the user's module may raise anything
                raise _raised(f"reward {entry.location}: importing it", error, "") from None

    def answer(self, request: Mapping[str, Any]) -> None:
        """Judge the answers of a request and reply. Raises RewardError, or exits after it has reported a fault."""
        answers, state = Answers(**request["answers"]), TrainerState(*request["progress"])
        until_s = request["until_s"] - MARGIN_S
        logged: dict[str, dict[str, Any]] = {reward.name: {} for reward in self._rewards}
        tasks = list(self._tasks(answers, *request["part"]))
        calls: list[_Call] = []
        for task in tasks:
            for call, arguments in _calls(task, answers, state, _logs(logged[task.reward.name])):
                calls.append(call)
                self._tell({"at": [call.reward.name, call.place]})
                try:
                    call.returned = self._called(call.reward, arguments)
                except BaseException as error:  # noqa: BLE001  SystemExit among them
                    self._end_by(call, error, answers, state)
        most = {task.reward.name: task.entry.concurrency for task in tasks}
        waiting = [call for call in calls if _is_awaitable(call.returned)]
        failed = self._loop.run(_await(waiting, until_s, most))
        if failed is not None and isinstance(failed[1], _Late):
            raise _late(*failed, request["timeout_s"])
        if failed is not None:
            self._end_by(*failed, answers, state)
        values = {task.reward.name: self._values(task, calls) for task in tasks}
        split = [task.reward.name for task in tasks if task.reward.form.per_answer]
        self._tell({"values": values, "split": split, "logged": logged})

    def _tasks(self, answers: Answers, part: int, parts: int) -> Iterator[_Task]:
        """What this process, the `part`-th of `parts`, does: every so-manieth answer where they are judged one by
        one, every so-manieth reward otherwise."""
        for number, (entry, reward) in enumerate(zip(self._settings, self._rewards, strict=True)):
            places = range(len(answers))
            if reward.form.per_answer:
                places = places[part::parts]
            elif number % parts != part:
                continue
            keys: dict[int, str] = {}
            if entry.cache:
                code = code_digest(reward.file, entry.location, entry.kwargs)
                rows = {place: {n: v[place] for n, v in answers.columns.items()} for place in places}
                keys = {
                    place: key_of(
                        code,
                        answers.prompts[place],
                        rows[place],
                        answers.completions[place],
                        answers.completion_ids[place],
                    )
                    for place in places
                }
            yield _Task(entry, reward, places, keys, self._kept.find(keys))

    def _values(self, task: _Task, calls: Sequence[_Call]) -> Values:
        """The values of a task's answers, after its calls; those that are to be kept are."""
        todo = task.todo
        found = dict(task.known)
        if todo:
            returned = [call.returned for call in calls if call.reward is task.reward]
            found |= zip(todo, task.reward.values(returned, todo), strict=True)
            if task.keys:
                self._kept.keep((task.keys[place], found[place]) for place in todo)
        return [found[place] for place in task.places]

    def tell_fault(self, error: RewardError, searching: bool = False) -> None:
        """Report that a reward has failed.

        searching  a reply with the `place` follows
        """
        message = shortened(self.scrubbed(str(error)), MOST_MESSAGE + MOST_MESSAGE)
        trace = self.scrubbed(error.traceback)[-MOST_TRACEBACK:]
        self._tell({"fault": message, "traceback": trace, "place": error.place, "searching": searching})

    def _end_by(self, call: _Call, error: BaseException, answers: Answers, state: TrainerState) -> NoReturn:
        """Report what a call raised, then, for a call that judges several answers, one on which it fails. Exits."""
        if isinstance(error, RewardError):  # of a reward of ours: a sentence already
            place = None if error.place is None else call.places[error.place]
            self.tell_fault(RewardError(str(error), error.traceback, place))
            sys.exit()
        fault = _raised(f"reward {call.reward.name!r}", error, call.reward.file, call.place)
        searching = call.place is None and len(call.places) > 1
        self.tell_fault(fault, searching)
        if searching:
            self._tell({"place": self._guilty(call, answers, state)})
        sys.exit()

    def _guilty(self, failed: _Call, answers: Answers, state: TrainerState) -> int | None:
        """The index, found by bisection, of an answer on which a reward fails alone; None where it finds none."""

        def fails(places: Sequence[int]) -> bool:
            call = _Call(failed.reward, places)
            try:
                (arguments,) = call.reward.arguments(answers.select(places), state, _logs({}))
                call.returned = self._called(call.reward, arguments)
                waiting = [call] if _is_awaitable(call.returned) else []
                return self._loop.run(_await(waiting, time.monotonic() + MARGIN_S, {})) is not None
            except BaseException:  # noqa: BLE001  the fault that is looked for
                return True

        places = failed.places
        while len(places) > 1:
            half = places[: len(places) // 2]
            places = half if fails(half) else places[len(places) // 2 :]
        return places[0] if fails(places) else None

    def _called(self, reward: Reward, arguments: Mapping[str, Any]) -> Any:
        try:
            return reward.function(**arguments)
        finally:
            if os.getpid() != self._pid:  # the reward has forked, and its child returns here too
                os._exit(0)

    def _tell(self, reply: Mapping[str, Any]) -> None:
        text = json.dumps(reply, default=str)
        self._replies.write(text.encode() + b"\n")
        self._replies.flush()


class _Late(Exception):
    """An async reward has not ended in time; the traceback says where it waits."""


def _calls(
    task: _Task, answers: Answers, state: TrainerState, logs: Mapping[str, Any]
) -> Iterator[tuple[_Call, Mapping[str, Any]]]:
    """The calls of a task, with their arguments."""
    reward, todo = task.reward, task.todo
    if reward.form.per_answer:
        arguments = reward.arguments(answers, state, logs)
        yield from ((_Call(reward, [place]), arguments[place]) for place in todo)
    elif todo:
        some = answers if len(todo) == len(answers) else answers.select(todo)
        (given,) = reward.arguments(some, state, logs)
        yield _Call(reward, todo), given


async def _await(
    calls: Sequence[_Call], until_s: float, most: Mapping[str, int]
) -> tuple[_Call, BaseException] | None:
    """Await all calls together until `until_s` (time.monotonic(), in seconds).

    most  reward -> how many of its calls run at the same time
    Returns the first call that fails, with what it raised, or the first late one, with _Late; else None.
    """
    free = {name: asyncio.Semaphore(limit) for name, limit in most.items()}

    async def in_turn(call: _Call) -> Any:
        async with free.get(call.reward.name, contextlib.nullcontext()):
            return await call.returned

    tasks = {asyncio.ensure_future(in_turn(call)): call for call in calls}
    if not tasks:
        return None
    left_s = max(until_s - time.monotonic(), 0.0)
    done, late = await asyncio.wait(tasks, timeout=left_s, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            return tasks[task], error
        tasks[task].returned = task.result()
    for task in late:
        task.cancel()
        await asyncio.wait([task], timeout=MARGIN_S / 2)
        try:
            task.result()
        except BaseException as error:  # noqa: BLE001  the cancellation, raised where the task waited
            return tasks[task], _Late().with_traceback(error.__traceback__)
    return None


def _logs(told: dict[str, Any]) -> dict[str, Any]:
    """The logging functions that TRL offers to rewards; they write to `told`."""

    def log_extra(column: str, values: Sequence[Any]) -> None:
        told[column] = list(values)

    def log_metric(name: str, value: float) -> None:
        told[name] = value

    return {"log_extra": log_extra, "log_metric": log_metric}


def _is_awaitable(value: Any) -> bool:
    return hasattr(value, "__await__")


def _raised(what: str, error: BaseException, file: str, place: int | None = None) -> RewardError:
    """A RewardError for what the user's code raised, with only the frames of that code.

    file  the reward's source file: the message names the last line of it in the traceback
    """
    told = traceback.TracebackException.from_exception(error)
    told.stack = traceback.StackSummary.from_list(users_frames(told.stack))
    name = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    where = at_line(told.stack, file)
    if not where and isinstance(error, SyntaxError):
        where = f" at {error.filename}:{error.lineno}"
    sentence = f"{what} raised {shortened(name, MOST_MESSAGE)}{where}."
    return RewardError(sentence, "".join(told.format()), place)


def _late(call: _Call, error: BaseException, timeout_s: float) -> RewardError:
    frames = users_frames(traceback.extract_tb(error.__traceback__))
    message = late_message(f"reward {call.reward.name!r}", timeout_s, at_line(frames, call.reward.file))
    return RewardError(message, traced(frames), call.place)


def late_message(who: str, timeout_s: float, where: str) -> str:
    """The message about a reward that has not ended within `timeout_s` seconds."""
    return f"{who} gave no answer in {timeout_s:g} s{where}. Mend it or raise reward_timeout_s."


def _resolved(value: Any, blocks: Mapping[str, str]) -> Any:
    """The value of a kwarg: itself, or the secret that it names; None where that is not set."""
    named = secret_named(value)
    if named is None:
        return value
    kind, name = named
    return os.environ.get(name) if kind == "env" else blocks.get(name)


def _shown(secret: str) -> set[str]:
    """How messages may show a secret: as it is, without what is around it (a line break at its end), and as `repr`
    does."""
    return {secret, secret.strip(), repr(secret.strip())[1:-1]} - {""}


def _refuse_unknown(entry: _Entry, argument: str, value: Any) -> None:
    named = secret_named(entry.kwargs[argument])
    if value is None and named is not None:
        kind = "environment variable" if named[0] == "env" else "Prefect Secret block"
        raise RewardError(
            f"reward {entry.name!r}: its kwargs name the {kind} {named[1]!r} for {argument}, which is not set here."
        )


class _Scrubbed:
    """A text stream that replaces secrets by `***`."""

    def __init__(self, stream: Any, scrubbed: Any) -> None:
        self._stream, self._scrubbed = stream, scrubbed

    def write(self, text: str) -> int:
        return self._stream.write(self._scrubbed(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
