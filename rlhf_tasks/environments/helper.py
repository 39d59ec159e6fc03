"""The main loop of the process that runs a user's environments: read turns, call environments, reply.

Requests and replies are lines of JSON, as in rewards/helper.py. The first request has the factory, its arguments, and
the values of the Prefect blocks that these name; its reply is `{"pid": ...}`. The replies to a further request are
`{"at": [sample, method, open]}` before each call; `open` episodes wait for their answers then, this one among them.
Then comes `{"answers": [...]}`, each the fields of an Answer, or of a FailedAnswer where samples are skipped; or
`{"fault": ..., "traceback": ..., "sample": ...}`, after which the process ends.
"""

import asyncio
import json
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_tasks.environments.episodes import Answer, Episode, FailedAnswer, Played
from rlhf_tasks.rewards.forms import RewardError
from rlhf_tasks.rewards.helper import MARGIN_S, MOST_TRACEBACK, connected, late_message, raised
from rlhf_tasks.rewards.secret_arguments import SecretArguments
from rlhf_tasks.rewards.user_code import at_line, traced, users_frames

TIMEOUT_KEY = "environment.turn_timeout_s"


def serve(stacks: str) -> None:
    """Answer turns until an environment fails. stacks: the descriptor of the file to dump stacks to"""
    requests, replies = connected(int(stacks))

    def tell(reply: Mapping[str, Any]) -> None:
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()

    start = json.loads(requests.readline())
    tell({"pid": os.getpid()})
    name, secrets = f"environment {start['factory']}", SecretArguments(start["blocks"])
    try:
        try:
            played = Played(start["factory"], secrets.resolved(name, start["kwargs"]))
        except RewardError:
            raise
        except BaseException as error:  # noqa: BLE001  the user's module may raise anything
            raise raised(f"{name}: importing it", error, "") from None
        with asyncio.Runner() as loop:  # one for all requests: an environment may keep a connection open
            for request in requests:
                asked = json.loads(request)
                if asked["begins"]:
                    played.forget()
                episodes = [Episode(*each) for each in asked["episodes"]]
                until_s = asked["until_s"] - MARGIN_S
                turns = _Turns(played, name, tell, until_s, asked["timeout_s"], start["skips"])
                answers = loop.run(turns.answers(episodes))
                tell({"answers": [_scrubbed(answer, secrets) for answer in answers]})
    except RewardError as error:
        trace = secrets.scrubbed(error.traceback)[-MOST_TRACEBACK:]
        tell({"fault": secrets.scrubbed(str(error)), "traceback": trace, "sample": error.place})


def _scrubbed(answer: Answer | FailedAnswer, secrets: SecretArguments) -> Answer | FailedAnswer:
    return FailedAnswer(secrets.scrubbed(answer.reason)) if isinstance(answer, FailedAnswer) else answer


class _Turns:
    """The turns of one request, which wait together where environments are async.

    until_s    time.monotonic() until which all must be answered
    timeout_s  the seconds that they had
    skips      whether an episode in which the environment fails has a FailedAnswer for its answer
    """

    def __init__(
        self, played: Played, name: str, tell: Any, until_s: float, timeout_s: float, skips: bool
    ) -> None:
        self._played, self._name, self._tell, self._until_s = played, name, tell, until_s
        self._timeout_s, self._skips = timeout_s, skips
        self._open = 0  # episodes that were begun and wait for their answers

    async def answers(self, episodes: Sequence[Episode]) -> list[Answer | FailedAnswer]:
        """One answer for each episode, in their order, whichever comes first.

        Raises RewardError, whose `place` is the sample, for the first episode that has none; where such are skipped,
        only where no environment could be made.
        """
        tasks = [asyncio.ensure_future(self._answer(episode)) for episode in episodes]
        left_s = max(self._until_s - time.monotonic(), 0.0)
        _, late = await asyncio.wait(tasks, timeout=left_s)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=MARGIN_S / 2)
        found = list[Answer | FailedAnswer]()
        for episode, task in zip(episodes, tasks, strict=True):
            if task not in late:
                found.append(task.result())
            elif self._skips:
                found.append(FailedAnswer(str(self._late(episode, task))))
            else:
                raise self._late(episode, task)
        return found

    async def _answer(self, episode: Episode) -> Answer | FailedAnswer:
        called = [""]

        def at(method: str) -> None:
            called[0] = method
            self._tell({"at": [episode.sample, method, self._open]})

        self._open += 1
        try:
            return await self._played.answer(episode, at)
        except RewardError as error:
            failed = RewardError(str(error), error.traceback, episode.sample)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001  the user's code may raise anything, SystemExit among it
            what = f"{self._name}: {called[0] or 'making it'}"
            failed = raised(what, error, self._played.file, episode.sample)
        finally:
            self._open -= 1
        if self._skips and called[0]:
            return FailedAnswer(str(failed))
        raise failed

    def _late(self, episode: Episode, task: "asyncio.Task[Answer | FailedAnswer]") -> RewardError:
        try:
            task.result()
            frames = []
        except BaseException as error:  # noqa: BLE001  the cancellation, raised where the task waited
            frames = users_frames(traceback.extract_tb(error.__traceback__))
        where = at_line(frames, self._played.file)
        message = late_message(f"{self._name}: step", self._timeout_s, where, TIMEOUT_KEY)
        return RewardError(message, traced(frames), episode.sample)
