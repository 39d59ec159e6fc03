"""Judges answers by the user's rewards, in the process that runs these (child.py).

Rewards are asked for a batch at a time. What judges an answer alone, and is async, may be asked for it before, as
soon as the answer is there. The batch then takes what has begun, where it is about an answer that is equal in every
respect.
"""

import asyncio
import inspect
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from prefect_rlhf.rlhf_tasks.user_code.child import MARGIN_S, Caller, importing, late_ones
from prefect_rlhf.rlhf_tasks.user_code.errors import (
    RewardError,
    at_line,
    late_message,
    raised,
    shortened,
    traced,
)
from prefect_rlhf.rlhf_tasks.user_code.forms import Answers, Reward, RewardValue, TrainerState, load_reward
from prefect_rlhf.rlhf_tasks.user_code.kept_values import KeptValues, code_digest, keys_of
from prefect_rlhf.rlhf_tasks.user_code.service import RequestError, Service

TIMEOUT_KEY = "reward_timeout_s"


class _Failed(Exception):
    """A call has failed, and no other is awaited any longer."""


class _Late(Exception):
    """An async reward has not ended in time.

    frames    of the user's code where it waits
    had_time  whether it ran for more than half of the time: else the others of the batch have made it late
    """

    def __init__(self, frames: Sequence[traceback.FrameSummary], had_time: bool) -> None:
        super().__init__()
        self.frames, self.had_time = frames, had_time


@dataclass(frozen=True, slots=True)
class _Entry:
    """A reward of the configuration.

    free  for each of the calls that are awaited at the same time
    code  digest of what its values depend on beside the sample; "" where they are not kept
    only  column -> values of the rows that it judges; empty: all
    """

    reward: Reward
    free: asyncio.Semaphore
    code: str
    only: Mapping[str, Sequence[str | int]]

    @property
    def is_early(self) -> bool:
        """Whether it is asked for an answer before the others of the batch are there."""
        function = self.reward.function
        alone = self.reward.form.per_answer or self.reward.answers_per_call == 1
        return alone and any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))

    def judges(self, answers: Answers, place: int) -> bool:
        """Whether it judges the answer at an index."""
        row = {name: answers.columns[name][place] for name in self.only if name in answers.columns}
        return all(row.get(name) in values for name, values in self.only.items())


@dataclass(frozen=True, slots=True)
class _Batch:
    """The answers of a request.

    until_s    time.monotonic() until which they must be judged
    timeout_s  the seconds that there are for it
    """

    answers: Answers
    state: TrainerState
    until_s: float
    timeout_s: float


@dataclass(slots=True, eq=False)
class _Call:
    """One call of a reward.

    places    indices of the answers that it judges
    logged    what the reward logs
    returned  what it returned, or will be awaited
    error     what it raised; _Late where it has not ended in time
    began_s   time.monotonic() at which an async one had its turn; None before
    task      that awaits it; None where it is not awaited yet
    """

    reward: Reward
    places: Sequence[int]
    logged: dict[str, Any] = field(default_factory=dict)
    returned: Any = None
    error: BaseException | None = None
    began_s: float | None = None
    task: "asyncio.Task[None] | None" = None

    @property
    def place(self) -> int | None:
        """The index of the one answer that it judges; None where it judges several."""
        return self.places[0] if len(self.places) == 1 else None

    @property
    def fails_on_answers(self) -> bool:
        """Whether its error is that of its answers: not of the settings, not of a batch that is late as a whole."""
        match self.error:
            case _Late(had_time=had_time):
                return had_time and self.place is not None
            case RewardError(place=place):  # of a reward of ours
                return place is not None or isinstance(self.error, RequestError)
            case _:
                return self.error is not None

    def fault(self, timeout_s: float) -> RewardError:
        """Its error, in a sentence."""
        who, file = f"reward {self.reward.name!r}", self.reward.file
        match self.error:
            case RewardError() as error:  # of a reward of ours: a sentence already
                place = None if error.place is None else self.places[error.place]
                return RewardError(str(error), error.traceback, place)
            case _Late(frames=frames, had_time=had_time):
                message = late_message(who, timeout_s, at_line(frames, file), TIMEOUT_KEY)
                return RewardError(message, traced(frames), self.place if had_time else None)
            case error:
                assert error is not None, "the call has failed"
                return raised(who, error, file, self.place)


@dataclass(frozen=True, slots=True)
class _Share:
    """What this process does of one reward for a request.

    keys    place -> key of its value, where values are kept
    values  place -> value, at first of those that are kept
    logged  what the reward logs; of several calls, lists joined and numbers added
    """

    reward: Reward
    keys: Mapping[int, str]
    values: dict[int, RewardValue]
    logged: dict[str, Any] = field(default_factory=dict)

    def log(self, logged: Mapping[str, Any]) -> None:
        """Take what a call has logged."""
        for name, value in logged.items():
            before = self.logged.get(name)
            kinds = (list, int | float)
            if any(isinstance(value, kind) and isinstance(before, kind) for kind in kinds):
                value = before + value
            self.logged[name] = value

    def calls(self, places: Sequence[int]) -> Iterator[_Call]:
        """The calls that judge the answers at these places."""
        most = 1 if self.reward.form.per_answer else self.reward.answers_per_call or max(len(places), 1)
        for first in range(0, len(places), most):
            yield _Call(self.reward, places[first : first + most])


class _Early:
    """The calls of an iteration that have begun before their batch: by reward, and by what they judge."""

    def __init__(self) -> None:
        self._calls = defaultdict[tuple[str, str], deque[_Call]](deque)

    def add(self, call: _Call, answers: Answers) -> None:
        """Have a call ready for the batch."""
        (key,) = keys_of("early", answers, call.places).values()
        self._calls[call.reward.name, key].append(call)

    def take(self, reward: str, answers: Answers, places: Sequence[int]) -> dict[int, _Call]:
        """Place -> a call that judges the very answer there, for those of these places that have one."""
        taken = dict[int, _Call]()
        for place, key in keys_of("early" if self._calls else "", answers, places).items():
            if calls := self._calls.get((reward, key)):
                taken[place] = calls.popleft()
                taken[place].places = [place]
        return taken

    def cancel(self) -> None:
        """Nobody will ask for what is left."""
        for call in (call for calls in self._calls.values() for call in calls):
            assert call.task is not None, "an early call is awaited from its beginning"
            call.task.cancel()
            if call.task.done() and not call.task.cancelled():
                call.task.exception()  # asyncio writes about those that nobody reads


class Judge:
    """The rewards of one process.

    begin  `rewards`, as the configuration has them; `kept`, the folder of values that are kept, and `writer`, the
           name of this process's file there; `skips`: an answer that a reward fails on is skipped, else it is a
           fault; `alone`: nothing else judges, so a row that no reward judges is a fault
    Raises RewardError for a reward that cannot be used.
    """

    def __init__(self, begin: Mapping[str, Any], caller: Caller) -> None:
        self._caller, self._skips, self._alone = caller, begin["skips"], begin["alone"]
        self._cached = KeptValues(begin["kept"] and Path(begin["kept"]), begin["writer"])
        self.loop = asyncio.Runner()  # one for all requests: an async reward may keep a connection open
        rewards: list[Mapping[str, Any]] = begin["rewards"]
        # All secrets before any user's code: what it keeps of the streams hides them.
        resolved = [caller.secrets.resolved(f"reward {r['name']!r}", r["kwargs"]) for r in rewards]
        self._entries = [_entry(*pair) for pair in zip(rewards, resolved, strict=True)]
        self._early = dict[int, _Early]()  # by iteration

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """The verdict on the answers of a request; None where they come `early`, before their batch.

        request  `part`: this process's number, from 0, and how many there are; `left_out`: (reward, place) that are
                 not judged, since a process was lost over them; `early`: the numbers of these answers in their batch
        Returns `values`: reward -> (place, value) of each answer that it judged; `logged`: reward -> what it logged;
        `faults`: (reward, place, sentence) of each answer that is skipped; `early`: the places of answers that some
        reward was asked for before; `may_be_early`: whether some reward is asked so. Raises RewardError.
        """
        answers, state = Answers(**request["answers"]), TrainerState(*request["progress"])
        if (numbers := request.get("early")) is not None:
            self._ask_early(answers, state, numbers, request["part"])
            return None
        batch = _Batch(answers, state, request["until_s"] - MARGIN_S, request["timeout_s"])
        left_out = set(map(tuple, request["left_out"]))
        if self._alone:
            self._refuse_unrouted(answers)
        for iteration in [each for each in self._early if each < state.global_step]:
            self._early.pop(iteration).cancel()
        early = self._early.setdefault(state.global_step, _Early())
        shares, calls, begun = dict[str, _Share](), list[_Call](), set[int]()
        for entry, places in self._shared_out(answers, range(len(answers)), request["part"]):
            name = entry.reward.name
            places = [place for place in places if (name, place) not in left_out]
            taken = early.take(name, answers, places)
            new = [place for place in places if place not in taken]
            keys = keys_of(entry.code, answers, places)
            known = self._cached.find({place: key for place, key in keys.items() if place not in taken})
            shares[name] = _Share(entry.reward, keys, known)
            new_calls = shares[name].calls([place for place in new if place not in known])
            calls += sorted([*taken.values(), *new_calls], key=lambda call: call.places[0])
            begun.update(taken)
        faults: list[tuple[str, int, str]] = []
        for call in self._called(calls, batch):
            if call.error is None:
                shares[call.reward.name].log(call.logged)
            for place, value in zip(call.places, _values(call, batch), strict=True):
                if not isinstance(value, RewardError):
                    shares[call.reward.name].values[place] = value
                elif self._skips:
                    faults.append((call.reward.name, place, self._caller.sentence(value)))
                else:
                    raise value
        for share in shares.values():
            self._cached.keep((key, share.values[p]) for p, key in share.keys.items() if p in share.values)
        return {
            "values": {name: list(share.values.items()) for name, share in shares.items()},
            "logged": {name: share.logged for name, share in shares.items() if share.logged},
            "faults": faults,
            "early": sorted(begun),
            "may_be_early": any(entry.is_early for entry in self._entries),
        }

    def _ask_early(
        self, answers: Answers, state: TrainerState, numbers: Sequence[int], part: tuple[int, int]
    ) -> None:
        """Begin the calls that judge answers alone. They run while further requests are waited for (child.py).

        Nobody waits for them, so nothing is said of them here, and no fault is: their batch says it.
        """
        batch = _Batch(answers, state, 0.0, 0.0)
        for entry, places in self._shared_out(answers, numbers, part):
            known = self._cached.find(keys_of(entry.code, answers, places))
            for place in places if entry.is_early else ():
                if place not in known:
                    call = _Call(entry.reward, [place])
                    self._begin(call, batch, is_early=True)
                    if call.error is None:
                        call.task = self.loop.get_loop().create_task(self._judged_early(call, entry, batch))
                        self._early.setdefault(state.global_step, _Early()).add(call, answers)

    async def _judged_early(self, call: _Call, entry: _Entry, batch: _Batch) -> None:
        """Await an early call, and keep its value: a run that is killed before the batch is judged has it then."""
        (place,) = call.places  # its batch gives it another
        await self._in_turn(call, to_first_fault=not self._skips)
        if entry.code and call.error is None:
            with suppress(RewardError):
                (value,) = call.reward.values(call.returned, [place], batch.answers)
                if not isinstance(value, RewardError):
                    self._cached.keep(
                        (key, value) for key in keys_of(entry.code, batch.answers, [place]).values()
                    )

    def _shared_out(
        self, answers: Answers, numbers: Sequence[int], part: tuple[int, int]
    ) -> Iterator[tuple[_Entry, list[int]]]:
        """(reward, places of answers) of this process: the answers are shared out where they are judged one by one,
        the rewards otherwise. numbers: of the answers in their batch"""
        this, parts = part
        for number, entry in enumerate(self._entries):
            by_answer = entry.reward.form.per_answer
            if not by_answer and number % parts != this:
                continue
            places = [place for place, n in enumerate(numbers) if not by_answer or n % parts == this]
            yield entry, [place for place in places if entry.judges(answers, place)]

    def _refuse_unrouted(self, answers: Answers) -> None:
        """Raises RewardError for a row that all rewards leave to others."""
        for place in range(len(answers)):
            if not any(entry.judges(answers, place) for entry in self._entries):
                lacks = [None] * len(answers)
                names = dict.fromkeys(name for entry in self._entries for name in entry.only)
                row = ", ".join(f"{name}={answers.columns.get(name, lacks)[place]!r}" for name in names)
                raise RewardError(
                    f"no reward judges rows with {shortened(row, 200)}. Add a reward for them, or remove them.",
                    place=place,
                )

    def _called(self, calls: Sequence[_Call], batch: _Batch) -> list[_Call]:
        """The calls once they have ended; in place of one that has failed on several answers, those of `_apart`."""
        for call in calls:
            if call.task is None:
                self._begin(call, batch)
            if call.error is not None and not self._skips:
                self._stop(call, batch)
        self._finish(calls, batch, to_first_fault=not self._skips)
        failed = [call for call in calls if call.error is not None]  # a user's exception may be false
        faulty = [call for call in failed if not (self._skips and call.fails_on_answers)]
        if faulty:  # a fault explains more than a wait does
            self._stop(min(faulty, key=lambda call: isinstance(call.error, _Late)), batch)
        ended: list[_Call] = []
        for call in calls:
            ended += [call] if call.error is None or call.place is not None else self._apart(call, batch)
        return ended

    def _begin(self, call: _Call, batch: _Batch, is_early: bool = False) -> None:
        """Make a call; an async one is still to be awaited. is_early: nobody reads what is called"""
        reward = call.reward
        arguments = reward.arguments(batch.answers.select(call.places), batch.state, _logs(call.logged))
        try:
            if is_early:
                call.returned = reward.function(**arguments)
            else:
                call.returned = self._caller.call(reward.name, call.place, reward.function, **arguments)
        except BaseException as error:  # noqa: BLE001  SystemExit among them
            call.error = error

    def _finish(self, calls: Sequence[_Call], batch: _Batch, to_first_fault: bool = False) -> None:
        """Await the calls that are async, all together; to_first_fault: until one fails."""
        waiting = [
            call
            for call in calls
            if call.error is None and (call.task is not None or hasattr(call.returned, "__await__"))
        ]
        if waiting:
            self._caller.say_awaiting(waiting[0].reward.name)
            self.loop.run(self._awaited(waiting, batch.until_s, to_first_fault))

    async def _in_turn(self, call: _Call, to_first_fault: bool) -> None:
        """Await a call when it is its reward's turn."""
        (free,) = (entry.free for entry in self._entries if entry.reward is call.reward)
        async with free:
            call.began_s = time.monotonic()
            try:
                call.returned = await call.returned
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001  asyncio would let SystemExit through
                call.error = error
                if to_first_fault:
                    raise _Failed from None

    async def _awaited(self, calls: Sequence[_Call], until_s: float, to_first_fault: bool) -> None:
        half_s = max(until_s - time.monotonic(), 0.0) / 2
        tasks = {
            call.task or asyncio.ensure_future(self._in_turn(call, to_first_fault)): call for call in calls
        }
        late = await late_ones(tasks, until_s)
        for task, call in tasks.items():
            if task in late:
                if call.began_s is None and hasattr(call.returned, "close"):
                    call.returned.close()  # a coroutine that nobody will await
                call.error = _Late(late[task], call.began_s is not None and until_s - call.began_s > half_s)
            elif task.cancelled():  # by the reward itself
                call.error = asyncio.CancelledError()
            else:
                task.exception()  # asyncio writes about those that nobody reads

    def _stop(self, failed: _Call, batch: _Batch) -> NoReturn:
        """Raises the fault of a call. The answer that the user's code fails on is searched for."""
        fault = failed.fault(batch.timeout_s)
        if failed.place is None and not isinstance(failed.error, RewardError | _Late):
            self._caller.say_fault(fault, searching=True)
            alone = self._one_by_one(failed, batch)
            fault.place = next((call.place for call in alone if call.error is not None), None)
        raise fault

    def _apart(self, failed: _Call, batch: _Batch) -> list[_Call]:
        """The calls that take the place of one that failed on several answers: one for each answer that it fails on
        alone, and one for all others together.

        Raises RewardError where it fails on no answer alone, or on all others together.
        """
        alone = self._one_by_one(failed, batch)
        guilty = [call for call in alone if call.error is not None]
        others = [call.places[0] for call in alone if call.error is None]
        together = _Call(failed.reward, others)
        apart = [*guilty, together] if others else guilty
        if guilty and others:
            self._begin(together, batch)
            self._finish([together], batch)
        for call in apart:
            if call.error is not None and not call.fails_on_answers:
                self._stop(call, batch)
        last = together if guilty else failed
        if last.error is not None:
            fault = last.fault(batch.timeout_s)
            raise RewardError(
                f"{fault} It does so for {len(last.places)} answers together, for none of them alone, so that "
                "none can be skipped.",
                fault.traceback,
            )
        return apart

    def _one_by_one(self, failed: _Call, batch: _Batch) -> list[_Call]:
        """Calls for each answer of one that has failed; what they log is dropped."""
        calls = [_Call(failed.reward, [place]) for place in failed.places]
        for call in calls:
            self._begin(call, batch)
        self._finish(calls, batch)
        return calls


def _entry(stated: Mapping[str, Any], kwargs: Mapping[str, Any]) -> _Entry:
    """A reward of the configuration. kwargs: its arguments, secrets resolved; of a service, its headers"""
    name, location, per = stated["name"], stated["location"], stated["per"]
    if stated["service"] is not None:
        reward = Service(name, location, kwargs, per=per, **stated["service"]).reward()
    else:
        with importing(f"reward {location}"):
            reward = load_reward(name, location, kwargs, per)
    of_values = location if per == "sequence" else f"{location} per {per}"
    if stated["service"] is not None and stated["service"]["body"] != "own":
        of_values += f" as {stated['service']['body']}"
    code = code_digest(reward.file, of_values, stated["kwargs"]) if stated["cache"] else ""
    return _Entry(reward, asyncio.Semaphore(stated["concurrency"]), code, stated["only"])


def _values(call: _Call, batch: _Batch) -> Sequence[RewardValue | RewardError]:
    if call.error is not None:
        return [call.fault(batch.timeout_s)] * len(call.places)
    return call.reward.values(call.returned, call.places, batch.answers)


def _logs(logged: dict[str, Any]) -> dict[str, Any]:
    """The logging functions that TRL offers to rewards; they write to `logged`."""

    def log_extra(column: str, values: Sequence[Any]) -> None:
        logged[column] = list(values)

    def log_metric(name: str, value: float) -> None:
        logged[name] = value

    return {"log_extra": log_extra, "log_metric": log_metric}
