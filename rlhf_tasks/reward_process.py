"""The helper process beside a rank that runs the user's Python rewards, and its two ends of the pipe.

A reward may import anything, print, hang or crash: none of that may reach the rank, whose threads belong to
the engine. `subprocess`, not multiprocessing: Dask's workers are daemonic and may have no such children.
Each request and each answer is one line of JSON. The helper ends when its standard input closes, even in the
middle of a reward.
"""

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import IO, Any

from rlhf_tasks.config import AnyConfig, PPOConfig, RolloutConfig
from rlhf_tasks.config_parts import RewardFunction
from rlhf_tasks.rewards import Answers, RewardError, Values, call_reward, load_reward

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rlhf_tasks.reward_process import serve; serve()"
)


class RewardProcess:
    """One rank's helper, started with the first request and again after it was lost.

    Requests are answered one at a time, in order.
    """

    def __init__(self, config: AnyConfig) -> None:
        scores = isinstance(config, PPOConfig | RolloutConfig)
        self._rewards: tuple[RewardFunction, ...] = config.rewards if scores else ()
        self._timeout_s = config.reward_timeout_s if scores else 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rewards")

    def submit(self, answers: Answers) -> "Future[dict[str, Values]]":
        """Start judging; the future gives name -> values.

        Its exception is a RewardError when a reward raised, returned something but n finite numbers, took
        longer than `reward_timeout_s` or ended its process.
        """
        return self._thread.submit(self._judge, answers)

    def close(self) -> None:
        """End the helper, whatever it is doing; a request under way fails."""
        process = self._process  # read once: the judging thread may take it away meanwhile
        if process is not None:
            process.kill()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._kill()

    def _judge(self, answers: Answers) -> dict[str, Values]:
        if not self._rewards:
            return {}
        deadline = time.monotonic() + self._timeout_s
        process = self._started()
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(answers)).encode() + b"\n")
            process.stdin.flush()
            line = self._read_line(process, deadline)
        except BrokenPipeError:
            line = b""
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)  # its own exit status says more than that of our kill
            self._kill()
            names = ", ".join(repr(reward.name) for reward in self._rewards)
            raise RewardError(
                f"the process of the rewards {names} ended with exit status {process.returncode}."
            )
        reply = json.loads(line)
        if "error" in reply:
            self._kill()
            raise RewardError(reply["error"])
        return reply["values"]

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-c", _START, json.dumps(sys.path)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert self._process.stdin is not None
            settings = [reward.model_dump() for reward in self._rewards]
            self._process.stdin.write(json.dumps(settings).encode() + b"\n")
        return self._process

    def _read_line(self, process: "subprocess.Popen[bytes]", deadline: float) -> bytes:
        """One line of the helper's output, empty when it ended. Kills it at the deadline."""
        assert process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not select.select([process.stdout], [], [], remaining_s)[0]:
                self._kill()
                names = ", ".join(repr(reward.name) for reward in self._rewards)
                raise RewardError(
                    f"the rewards {names} gave no answer in {self._timeout_s:g} s. "
                    "Mend them or raise reward_timeout_s."
                )
            piece = os.read(process.stdout.fileno(), 1 << 16)
            if not piece:
                return b""
            line += piece
        return line

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # what was not written is of no use to a dead process
                pipe.close()


def serve() -> None:
    """The helper's own life: read the list of rewards, then answer requests until standard input closes."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is the run's to handle; it closes our standard input
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what rewards print must not mix with the answers
    lines: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_read_requests, args=(sys.stdin.buffer, lines), daemon=True).start()
    try:
        settings = [RewardFunction.model_validate(entry) for entry in json.loads(lines.get())]
        rewards = {entry.name: load_reward(entry.function, entry.kwargs) for entry in settings}
    except RewardError as error:
        _reply(replies, {"error": str(error)})
        return
    while True:
        answers = Answers(**json.loads(lines.get()))
        try:
            values = {name: call_reward(name, reward, answers) for name, reward in rewards.items()}
        except RewardError as error:
            _reply(replies, {"error": str(error)})
            return
        _reply(replies, {"values": values})


def _read_requests(stdin: IO[bytes], lines: "queue.Queue[bytes]") -> None:
    """Hand on each line; when the rank closes the pipe or dies, end this process at once."""
    for line in stdin:
        lines.put(line)
    os._exit(0)


def _reply(replies: IO[bytes], reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()
