"""The main loop of the process that runs a user's Python rewards: read requests, call rewards, reply.

Requests come on standard input; replies leave on the original standard output. Each is one line of JSON. The first
request has the rewards and the values of the Prefect blocks that their arguments name; its reply is `{"pid": ...}`.
The replies to a further request are `{"at": [reward, place]}` before each call, and then

- `{"values": ..., "split": ..., "logged": ..., "faults": ...}`; `split` names the rewards of which only a part of the
  answers was judged; `faults` has (reward, place, sentence) of each answer that a reward failed on, where these are
  skipped;
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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from rlhf_tasks.rewards.forms import (
    Answers,
    FoundReward,
    RewardError,
    RewardValue,
    TrainerState,
    Values,
    load_reward,
    shortened,
)
from rlhf_tasks.rewards.kept_values import KeptValues, code_digest, key_of
from rlhf_tasks.rewards.remote import RequestError, Service
from rlhf_tasks.rewards.secret_arguments import SecretArguments
from rlhf_tasks.rewards.user_code import at_line, traced, users_frames

STACK_SIGNAL = signal.SIGRTMAX  # makes this process dump its stack, whatever it is doing
MARGIN_S = 0.5  # async rewards time out this much before the process does, so that the late one can be named
MOST_MESSAGE, MOST_TRACEBACK = 400, 8000  # characters


def connected(stacks: int) -> tuple[BinaryIO, BinaryIO]:
    """(requests, replies) of a helper process. Its code may read its input and print: neither mixes with these.

    From here on STACK_SIGNAL and a crash dump the stack to the file of the descriptor `stacks`.
    """
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    faulthandler.enable(stacks, all_threads=False)
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=False)
    return requests, replies


def serve(stacks: str) -> None:
    """Answer requests until a reward fails. stacks: the descriptor of the file to dump stacks to"""
    requests, replies = connected(int(stacks))
    start = json.loads(requests.readline())
    folder = start["kept"] and Path(start["kept"])
    kept = KeptValues(folder, start["writer"])
    entries = [_Entry(**entry) for entry in start["rewards"]]
    helper = Helper(replies, entries, start["blocks"], kept, start["skips"])
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
    per: str


@dataclass(slots=True)
class _Call:
    """One call of a reward.

    places     indices of the answers that it judges
    returned   what it returned, or will be awaited
    error      what it raised; _Late where it has not ended in time
    began_s    time.monotonic() at which an async one had its turn; None before
    is_search  it judges one of the answers of a call that has failed
    """

    reward: FoundReward
    places: Sequence[int]
    returned: Any = None
    error: BaseException | None = None
    began_s: float | None = None
    is_search: bool = False

    @property
    def place(self) -> int | None:
        """The index of the one answer that it judges; None where it judges several."""
        return self.places[0] if self.reward.form.per_answer or self.is_search else None

    @property
    def can_be_skipped(self) -> bool:
        """Whether its answer, which it judges alone, is skipped where it fails."""
        if self.reward.answers_per_call is not None:
            return isinstance(self.error, RequestError) and len(self.places) == 1
        if isinstance(self.error, _Late) and not self.error.had_time:
            return False
        return self.place is not None and not self.is_hopeless

    @property
    def is_hopeless(self) -> bool:
        """Whether it would fail again: a reward of ours does so without a place where its settings are at fault."""
        error = self.error
        return isinstance(error, RewardError) and not isinstance(error, RequestError) and error.place is None


@dataclass(frozen=True, slots=True)
class _Task:
    """What this process does of one reward for a request.

    places    indices of the answers that it gives values for
    keys      place -> key of its value where values are kept
    known     place -> value, as kept
    left_out  places that it does not judge: the process was lost when it did
    """

    entry: _Entry
    reward: FoundReward
    places: Sequence[int]
    keys: Mapping[int, str]
    known: Mapping[int, RewardValue]
    left_out: Collection[int]

    @property
    def todo(self) -> list[int]:
        """The places that are still to be judged."""
        return [place for place in self.places if place not in self.known and place not in self.left_out]


class Helper:
    """The rewards of one helper process.

    blocks  name of a Prefect Secret block -> its value
    skips   whether an answer that a reward fails on is skipped; else the process ends there
    """

    def __init__(
        self,
        replies: Any,
        settings: Sequence[_Entry],
        blocks: Mapping[str, str],
        kept: KeptValues,
        skips: bool,
    ) -> None:
        self._replies, self._settings, self._kept, self._skips = replies, settings, kept, skips
        self._pid = os.getpid()
        self._secrets = SecretArguments(blocks)
        self._rewards: list[FoundReward] = []
        self._loop = asyncio.Runner()  # one for all requests: an async reward may keep a connection open

    def load(self) -> None:
        """Find every reward. Raises RewardError."""
        self._tell({"pid": self._pid})
        # All secrets before any user's code: what it keeps of the streams hides them.
        resolved = [self._secrets.resolved(f"reward {each.name!r}", each.kwargs) for each in self._settings]
        for entry, kwargs in zip(self._settings, resolved, strict=True):
            if entry.service is not None:
                service = Service(entry.name, entry.location, kwargs, per=entry.per, **entry.service)
                self._rewards.append(service.reward())
                continue
            try:
                self._rewards.append(load_reward(entry.name, entry.location, kwargs, entry.per))
            except RewardError:
                raise
            except BaseException as error:  # noqa: BLE001  the user's module may raise anything
                raise raised(f"reward {entry.location}: importing it", error, "") from None

    def answer(self, request: Mapping[str, Any]) -> None:
        """Judge the answers of a request and reply. Raises RewardError, or exits after it has reported a fault."""
        answers, state = Answers(**request["answers"]), TrainerState(*request["progress"])
        until_s, timeout_s = request["until_s"] - MARGIN_S, request["timeout_s"]
        logged: dict[str, dict[str, Any]] = {reward.name: {} for reward in self._rewards}
        tasks = list(self._tasks(answers, request["part"], request["left_out"]))
        most = {task.reward.name: task.entry.concurrency for task in tasks}
        calls: list[_Call] = []
        for task in tasks:
            for call, arguments in _calls(task, answers, state, _logs(logged[task.reward.name])):
                calls.append(call)
                self._begin(call, arguments)
                if call.error is not None and not self._skips:
                    self._end_by(call, call.error, answers, state)
        self._finish(calls, until_s, most)
        for call in list(calls):
            if call.error is None:
                continue
            if not self._skips and not isinstance(call.error, _Late):
                self._end_by(call, call.error, answers, state)
            if not call.can_be_skipped:
                if isinstance(call.error, _Late) or call.is_hopeless:
                    raise _fault(call, call.error, timeout_s)
                logs = _logs(logged[call.reward.name])
                calls.remove(call)
                calls += self._one_by_one(call, answers, state, logs, until_s, timeout_s, most)
        faults: list[tuple[str, int, str]] = []
        values = {task.reward.name: self._values(task, calls, answers, faults, timeout_s) for task in tasks}
        split = [task.reward.name for task in tasks if task.reward.form.per_answer]
        self._tell({"values": values, "split": split, "logged": logged, "faults": faults})

    def _begin(self, call: _Call, arguments: Mapping[str, Any]) -> None:
        """Make a call; an async one is still to be awaited."""
        self._tell({"at": [call.reward.name, call.place]})
        try:
            call.returned = self._called(call.reward, arguments)
        except BaseException as error:  # noqa: BLE001  SystemExit among them
            call.error = error

    def _finish(self, calls: Sequence[_Call], until_s: float, most: Mapping[str, int]) -> None:
        """Await the calls that are async, all together."""
        waiting = [call for call in calls if call.error is None and _is_awaitable(call.returned)]
        if waiting:
            self._tell({"at": [waiting[0].reward.name, None]})  # whichever blocks the loop is not known
            self._loop.run(_await(waiting, until_s, most, to_the_end=self._skips))

    def _one_by_one(
        self,
        failed: _Call,
        answers: Answers,
        state: TrainerState,
        logs: Mapping[str, Any],
        until_s: float,
        timeout_s: float,
        most: Mapping[str, int],
    ) -> list[_Call]:
        """The calls that take the place of one (of a service: a request) that failed on several answers: one for each
        answer that it fails on alone, and one for all others together.

        Raises RewardError where it fails on no answer alone, or on all others together.
        """

        def make(calls: list[_Call], logs: Mapping[str, Any]) -> list[_Call]:
            for call in calls:
                (arguments,) = call.reward.arguments(answers.select(call.places), state, logs)
                self._begin(call, arguments)
            self._finish(calls, until_s, most)
            return calls

        reward = failed.reward
        alone = make([_Call(reward, [place], is_search=True) for place in failed.places], _logs({}))
        guilty = [call for call in alone if call.error is not None]
        others = _Call(reward, [call.places[0] for call in alone if call.error is None])
        together = make([others] if guilty and others.places else [], logs)
        for call in (*guilty, *together):
            if call.is_hopeless or (call is others and isinstance(call.error, _Late)):
                assert call.error is not None
                raise _fault(call, call.error, timeout_s)
        last = others if guilty else failed
        if last.error is not None:
            told = raised(f"reward {reward.name!r}", last.error, reward.file)
            raise RewardError(
                f"{told} It does so for {len(last.places)} answers together, for none of them alone, so that "
                "none can be skipped.",
                told.traceback,
            )
        return guilty + together

    def _tasks(
        self, answers: Answers, of: tuple[int, int], left_out: Sequence[tuple[str, int]]
    ) -> Iterator[_Task]:
        """What this process does: every so-manieth answer where they are judged one by one, every so-manieth reward
        otherwise.

        of        its number, from 0, and how many there are
        left_out  (reward, place) that it does not judge
        """
        part, parts = of
        for number, (entry, reward) in enumerate(zip(self._settings, self._rewards, strict=True)):
            places = range(len(answers))
            if reward.form.per_answer:
                places = places[part::parts]
            elif number % parts != part:
                continue
            keys: dict[int, str] = {}
            if entry.cache:
                per = "" if entry.per == "sequence" else f" per {entry.per}"
                code = code_digest(reward.file, f"{entry.location}{per}", entry.kwargs)
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
            lost = {place for name, place in left_out if name == reward.name}
            yield _Task(entry, reward, places, keys, self._kept.find(keys), lost)

    def _values(
        self,
        task: _Task,
        calls: Sequence[_Call],
        answers: Answers,
        faults: list[tuple[str, int, str]],
        timeout_s: float,
    ) -> Values:
        """The values of a task's answers, after its calls; those that are to be kept are.

        faults  gets (reward, place, sentence) of the answers that are skipped; their values are None
        Raises RewardError for a bad value where none is skipped.
        """
        found = dict(task.known)
        for call in calls:
            if call.reward is not task.reward:
                continue
            if call.error is not None:
                fault = _fault(call, call.error, timeout_s)
                values: Sequence[RewardValue | RewardError] = [fault] * len(call.places)
            else:
                values = call.reward.values(call.returned, call.places, answers)
            for place, value in zip(call.places, values, strict=True):
                if not isinstance(value, RewardError):
                    found[place] = value
                elif self._skips:
                    faults.append((task.reward.name, place, self._sentence(value)))
                else:
                    raise value
        if task.keys:
            new = [place for place in found if place not in task.known]
            self._kept.keep((task.keys[place], found[place]) for place in new)
        return [found.get(place) for place in task.places]

    def _sentence(self, error: RewardError) -> str:
        return shortened(self._secrets.scrubbed(str(error)), MOST_MESSAGE + MOST_MESSAGE)

    def tell_fault(self, error: RewardError, searching: bool = False) -> None:
        """Report that a reward has failed.

        searching  a reply with the `place` follows
        """
        trace = self._secrets.scrubbed(error.traceback)[-MOST_TRACEBACK:]
        self._tell(
            {"fault": self._sentence(error), "traceback": trace, "place": error.place, "searching": searching}
        )

    def _end_by(self, call: _Call, error: BaseException, answers: Answers, state: TrainerState) -> NoReturn:
        """Report what a call raised, then, for a call that judges several answers, one on which it fails. Exits."""
        if isinstance(error, RewardError):  # of a reward of ours: a sentence already
            place = None if error.place is None else call.places[error.place]
            self.tell_fault(RewardError(str(error), error.traceback, place))
            sys.exit()
        fault = raised(f"reward {call.reward.name!r}", error, call.reward.file, call.place)
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
                if _is_awaitable(call.returned):
                    self._loop.run(_await([call], time.monotonic() + MARGIN_S, {}))
                return call.error is not None
            except BaseException:  # noqa: BLE001  the fault that is looked for
                return True

        places = failed.places
        while len(places) > 1:
            half = places[: len(places) // 2]
            places = half if fails(half) else places[len(places) // 2 :]
        return places[0] if fails(places) else None

    def _called(self, reward: FoundReward, arguments: Mapping[str, Any]) -> Any:
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
    """An async reward has not ended in time; the traceback says where it waits.

    had_time  whether it ran for more than half of the time: else the others of the batch have made it late
    """

    def __init__(self, had_time: bool) -> None:
        super().__init__()
        self.had_time = had_time


def _calls(
    task: _Task, answers: Answers, state: TrainerState, logs: Mapping[str, Any]
) -> Iterator[tuple[_Call, Mapping[str, Any]]]:
    """The calls of a task, with their arguments."""
    reward, todo = task.reward, task.todo
    if reward.form.per_answer:
        arguments = reward.arguments(answers, state, logs)
        yield from ((_Call(reward, [place]), arguments[place]) for place in todo)
        return
    most = reward.answers_per_call or max(len(todo), 1)
    for first in range(0, len(todo), most):
        places = todo[first : first + most]
        some = answers if len(places) == len(answers) else answers.select(places)
        (given,) = reward.arguments(some, state, logs)
        yield _Call(reward, places), given


async def _await(
    calls: Sequence[_Call], until_s: float, most: Mapping[str, int], to_the_end: bool = False
) -> None:
    """Await all calls together until `until_s` (time.monotonic(), in seconds). Sets what they return or raise; the
    error of one that is late is _Late.

    most        reward -> how many of its calls run at the same time
    to_the_end  go on after one has failed
    """
    free = {name: asyncio.Semaphore(limit) for name, limit in most.items()}

    async def in_turn(call: _Call) -> Any:
        async with free.get(call.reward.name, contextlib.nullcontext()):
            call.began_s = time.monotonic()
            return await call.returned

    tasks = {asyncio.ensure_future(in_turn(call)): call for call in calls}
    left_s = max(until_s - time.monotonic(), 0.0)
    until = asyncio.ALL_COMPLETED if to_the_end else asyncio.FIRST_EXCEPTION
    done, late = await asyncio.wait(tasks, timeout=left_s, return_when=until)
    for task in done:
        call = tasks[task]
        call.error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if call.error is None:
            call.returned = task.result()
    if not late or (not to_the_end and any(tasks[task].error is not None for task in done)):
        return
    for task in late:
        task.cancel()
    await asyncio.wait(late, timeout=MARGIN_S / 2)
    for task in late:
        call = tasks[task]
        if call.began_s is None and hasattr(call.returned, "close"):
            call.returned.close()  # a coroutine that nobody will await
        call.error = _Late(call.began_s is not None and until_s - call.began_s > left_s / 2)
        try:
            task.result()
        except BaseException as error:  # noqa: BLE001  the cancellation, raised where the task waited
            call.error = call.error.with_traceback(error.__traceback__)


def _logs(told: dict[str, Any]) -> dict[str, Any]:
    """The logging functions that TRL offers to rewards; they write to `told`."""

    def log_extra(column: str, values: Sequence[Any]) -> None:
        told[column] = list(values)

    def log_metric(name: str, value: float) -> None:
        told[name] = value

    return {"log_extra": log_extra, "log_metric": log_metric}


def _is_awaitable(value: Any) -> bool:
    return hasattr(value, "__await__")


def raised(what: str, error: BaseException, file: str, place: int | None = None) -> RewardError:
    """A RewardError for what the user's code raised, with only the frames of that code.

    file  that code's source file: the message names the last line of it in the traceback
    """
    told = traceback.TracebackException.from_exception(error)
    told.stack = traceback.StackSummary.from_list(users_frames(told.stack))
    name = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    where = at_line(told.stack, file)
    if not where and isinstance(error, SyntaxError):
        where = f" at {error.filename}:{error.lineno}"
    sentence = f"{what} raised {shortened(name, MOST_MESSAGE)}{where}."
    return RewardError(sentence, "".join(told.format()), place)


def _fault(call: _Call, error: BaseException, timeout_s: float) -> RewardError:
    """A RewardError for the error of a call."""
    if isinstance(error, RewardError):
        return error
    if not isinstance(error, _Late):
        return raised(f"reward {call.reward.name!r}", error, call.reward.file, call.place)
    frames = users_frames(traceback.extract_tb(error.__traceback__))
    message = late_message(f"reward {call.reward.name!r}", timeout_s, at_line(frames, call.reward.file))
    return RewardError(message, traced(frames), call.place if error.had_time else None)


def late_message(who: str, timeout_s: float, where: str, key: str = "reward_timeout_s") -> str:
    """The message about the user's code that has not ended within `timeout_s` seconds, which `key` sets."""
    return f"{who} gave no answer in {timeout_s:g} s{where}. Mend it or raise {key}."
