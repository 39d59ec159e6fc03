"""The process of vLLM beside a rank, as the rank sees it: started, asked, watched, ended; and the generator on it.

Between the rank and vLLM stand two keepers (system/child_processes.py): whatever vLLM starts ends with the rank. Each
wait has a deadline, which progress moves on. What passes it, or a process that has ended, is a fault of the run like
a dead rank: the iteration begins anew with a new process. vLLM draws the same tokens again only where it is
deterministic (its batch-invariant mode, on GPUs that have it); a commit has the samples that were drawn.
"""

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import broadcast_json
from prefect_rlhf.rlhf_tasks.parallel.generate.beside import STALL_S, START_S, GenerationFault
from prefect_rlhf.rlhf_tasks.parallel.generate.drawn import requests_of, samples_of, sampling_of
from prefect_rlhf.rlhf_tasks.parallel.generate.generator import Order, Terms
from prefect_rlhf.rlhf_tasks.parallel.generate.handover import Handover
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import base_of
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from prefect_rlhf.rlhf_tasks.system.child_pipes import END_S, ChildOutput, Lines, end_keeper
from prefect_rlhf.rlhf_tasks.system.child_processes import kept_call_of, users_environment
from prefect_rlhf.rlhf_tasks.system.rank_process import give_back

SERVE = "prefect_rlhf.rlhf_tasks.parallel.generate.vllm_server:serve"
VISIBLE = "CUDA_VISIBLE_DEVICES"
LEAST_S = 1.0


class VllmProcess:
    """A running vLLM.

    begin    what it begins with, as JSON
    visible  CUDA_VISIBLE_DEVICES of it and its workers; None: as this process has it
    """

    def __init__(
        self,
        python: str,
        begin: Mapping[str, Any],
        patience: float,
        serve: str = SERVE,
        visible: str | None = None,
    ) -> None:
        self._patience, self._ready = patience, False
        self._output = ChildOutput("the process of vLLM")
        try:
            with self._output as output:
                self._keeper = subprocess.Popen(
                    kept_call_of(python, serve),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    env=_environment() | ({} if visible is None else {VISIBLE: visible}),
                    start_new_session=True,
                )
        except OSError as error:
            self._output.close()
            raise GenerationFault(
                f"generation.python: {python} cannot be run here ({error.strerror}). Name the Python of an "
                "environment with vLLM that is on each host."
            ) from None
        self._lines = Lines(self._keeper)
        self._started_s = time.monotonic()
        self._send(begin, START_S)

    def ask(self, request: Mapping[str, Any], until_each_s: float = STALL_S) -> dict[str, Any]:
        """The reply to a request. Raises GenerationFault."""
        if not self._ready:
            late_s = time.monotonic() + LEAST_S  # what it has said meanwhile is read
            self._read(max(self._until(START_S, self._started_s), late_s), START_S, "start")
            self._ready = True
        ((what, _),) = request.items()
        self._send(request, until_each_s)
        until_s, drawn = self._until(until_each_s), 0
        while "drawn" in (reply := self._read(until_s, until_each_s, what)):
            if reply["drawn"] > drawn:  # a process that only says that it lives makes no progress
                until_s, drawn = self._until(until_each_s), reply["drawn"]
        return reply

    def _until(self, within_s: float, since_s: float | None = None) -> float:
        return (time.monotonic() if since_s is None else since_s) + within_s * self._patience

    def _send(self, request: Mapping[str, Any], within_s: float) -> None:
        try:
            self._lines.send(json.dumps(request), self._until(within_s))
        except TimeoutError:
            raise GenerationFault(
                f"vLLM has not read a request for {within_s * self._patience:.0f} s"
            ) from None

    def _read(self, until_s: float, within_s: float, what: str) -> dict[str, Any]:
        try:
            reply = self._lines.read(until_s)
        except TimeoutError:
            within_s *= self._patience
            raise GenerationFault(f"vLLM has made no progress for {within_s:.0f} s ({what})") from None
        if reply is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._keeper.wait(END_S)
            raise GenerationFault(f"the process of vLLM has ended ({what}, status {self._keeper.poll()})")
        if "fault" in reply:
            raise GenerationFault(f"vLLM has failed ({what}): {reply['fault']}\n{reply['traceback']}")
        return reply

    def kill(self) -> None:
        """From any thread: end it. A request that waits fails."""
        self._keeper.terminate()

    def close(self) -> None:
        """End it and everything it has started, and wait for that."""
        end_keeper(self._keeper)
        self._output.close()


def _environment() -> dict[str, str]:
    inherited = {name: value for name, value in users_environment().items() if not name.startswith("PYTHON")}
    threads = str(torch.get_num_threads())
    return {
        **inherited,
        "OMP_NUM_THREADS": threads,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other ranks have processes of vLLM too
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **({} if torch.cuda.is_available() else {"TORCHDYNAMO_DISABLE": "1"}),
    }


class Vllm:
    """The `Generator` on vLLM: a process on the head of each replica, which gets the weights of all its ranks.

    Its tensor parallelism has as many ranks as the replica. On GPUs that has never been run.
    """

    serve = SERVE

    draws_turns = False

    @staticmethod
    def shares_gpu(engine: Engine) -> bool:
        """Whether vLLM has its memory where the rank has, and so only while it draws."""
        return engine.device.type == "cuda"

    def __init__(self, terms: Terms) -> None:
        self.version = -1
        self._terms = terms
        self._handover = Handover()
        self._process: VllmProcess | None = None
        self._engine: Engine | None = None
        self._taken: tuple[int, int] | None = None
        self._starts = threading.Lock()
        self._aborted = False

    def take(self, engine: Engine) -> None:
        """Hand an engine's weights over, unless it has them. Raises GenerationFault where others arrive.

        Collective over the replica. Its head says whether weights are needed: only it knows what its vLLM has, which
        also draws for other placements, and sleeps.
        """
        self._engine, self.version = engine, engine.version
        starts = self._process is None and not self._aborted
        needs, starts = _said_by_head(engine, [self._taken != (id(engine), engine.version), starts])
        if not needs:
            return
        self._taken = None
        if self.shares_gpu(engine):
            give_back()  # vLLM needs what torch keeps for later tensors
        visible = visible_together(engine) if starts else None
        if engine.is_head and starts:
            self._start(engine, visible)
        handed = self._handover.write(engine, self.shares_gpu(engine))
        if handed is not None:
            taken = self._reply_to({"take": handed})
            version, theirs = taken.get("version"), taken.get("digests", {})
            if version != handed["version"]:
                raise GenerationFault(
                    f"vLLM has weights of version {version}, and was given {handed['version']}"
                )
            other = [name for name, ours in handed["digests"].items() if theirs.get(name) != ours]
            if other:
                raise GenerationFault(
                    f"vLLM on rank {engine.groups.rank} has other bits of {other[0]!r} than it was given"
                )
        _said_by_head(engine, None)  # vLLM has read what ranks have lent
        self._handover.lent.take_back()
        self._taken = (id(engine), engine.version)

    def draw(self, batch: SampleBatch, order: Order) -> SampleBatch | None:
        """Ask vLLM for one response to each prompt. Collective over the replica: no rank is ahead of its head."""
        engine = self._engine
        assert engine is not None, "draw before take"
        assert order.segments is None, "the configuration refuses segments"
        answered = self._drawn(engine, batch, order) if engine.is_head else None
        _said_by_head(engine, None)
        return answered

    def _drawn(self, engine: Engine, batch: SampleBatch, order: Order) -> SampleBatch:
        requests, answers = requests_of(batch, order), []
        if requests:
            draw = {"requests": requests, "sampling": sampling_of(order)}
            answers = self._reply_to({"draw": draw})["answers"]
        return samples_of(engine, batch, requests, answers, order)

    def _reply_to(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._process is None:
            raise GenerationFault("the process of vLLM was ended")
        return self._process.ask(request)

    def _start(self, engine: Engine, visible: str | None) -> None:
        terms, strategy = self._terms, engine.placement.strategy
        process = VllmProcess(
            terms.settings["python"],
            {
                "folder": str(base_of(terms.folder)),
                "tokenizer": terms.tokenizer,
                "dtype": terms.dtype,
                "tokens": terms.tokens,
                "most_tokens": terms.most_tokens,
                "kv_bytes": terms.settings["kv_bytes"],
                "tp": strategy.tp * strategy.pp,
                "sleeps": self.shares_gpu(engine),
            },
            terms.patience,
            self.serve,
            visible,
        )
        with self._starts:
            self._process, aborted = process, self._aborted
        if aborted:  # while it was started
            process.kill()

    def free(self) -> None:
        """On GPUs vLLM sleeps: its weights and caches are freed until the next `take`.

        Collective over the replica: vLLM has memory of all its GPUs, and only its head can ask for it.
        """
        # Awake it has taken weights. After a call of another role, which our engine drew for, it sleeps already.
        engine = self._engine
        if self._taken is None or engine is None or not self.shares_gpu(engine):
            return
        self._taken = None
        if engine.is_head:
            self._reply_to({"sleep": True})
        _said_by_head(engine, None)

    def abort(self) -> None:
        """End the process: what waits for it raises."""
        with self._starts:
            self._aborted, process = True, self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process, and let go of the memory of the weights."""
        if self._process is not None:
            self._process.close()
        self._process = None
        self._handover.close()


def visible_together(engine: Engine) -> str | None:
    """The GPUs of a replica's ranks, as CUDA_VISIBLE_DEVICES names them: each rank sees its own first. None where a
    rank has no such variable.

    Collective over the replica.
    """
    replica = engine.placement.replica(engine.coordinate.dp)
    group, here = engine.groups[replica], os.environ.get(VISIBLE)
    of_ranks = [broadcast_json(here, rank, group, engine.device) for rank in replica]
    if None in of_ranks:
        return None
    return ",".join(filter(None, (of_rank.partition(",")[0] for of_rank in of_ranks)))


def _said_by_head(engine: Engine, value: Any) -> Any:
    """What the replica's head has, on all its ranks. They wait by gloo: NCCL would keep the GPUs busy on which vLLM
    draws meanwhile."""
    dp = engine.coordinate.dp
    replica = engine.placement.replica(dp)
    return broadcast_json(value, engine.placement.heads[dp], engine.groups[replica], torch.device("cpu"))
