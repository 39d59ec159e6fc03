"""Rank processes of their own: started, given one function to call, ended."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from rlhf_tasks.parallel.comm.groups import join_world, leave_world
from rlhf_tasks.system.child_processes import die_with_parent
from rlhf_tasks.system.rank_process import OutOfMemory, told_when_out
from rlhf_tasks.system.reading import ConfigError

GRACE_S = 5.0  # for the peers of a rank that failed to say what they saw
ENDS_S = 10.0  # for a rank that has answered to end


def run_ranks(n: int, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
    """Call `function(rank, device, *args)` on n new rank processes in one world. Returns their results in rank order.

    function, args  travel by pickle, and so do the results
    The ranks compute on this machine's GPUs if there is one for each, else on the CPU, with one thread each.
    Raises ConfigError where memory ran out, RuntimeError with the first rank's error, TimeoutError after `timeout_s`.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn, pipes, processes = multiprocessing.get_context("spawn"), list[Connection](), []
    try:
        for rank in range(n):
            ours, theirs = spawn.Pipe(duplex=False)
            work = (rank, n, store.port, os.getpid(), timeout_s, theirs, function, args)
            process = spawn.Process(target=_rank, args=work, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        results = _collected(pipes, timeout_s)
        for process in processes:
            process.join(ENDS_S)
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collected(pipes: list[Connection], timeout_s: float) -> list[Any]:
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    results: list[Any] = [None] * len(pipes)
    deadline, failed = time.monotonic() + timeout_s, list[tuple[int, type[Exception], str]]()
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), left):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                fault, results[rank] = pipe.recv()
            except EOFError:
                fault = ConfigError
                results[rank] = (
                    f"rank {rank} was ended, as the kernel does when memory runs out. Use fewer ranks."
                )
            if fault is not None:
                failed.append((rank, fault, results[rank]))
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if failed:
        rank, fault, said = min(failed, key=lambda each: (each[1] is not ConfigError, each[0]))
        raise fault(said)
    if waiting:
        raise TimeoutError(f"ranks {sorted(waiting.values())} gave no result in {timeout_s:g} s")
    return results


def _rank(
    rank: int,
    n: int,
    port: int,
    parent: int,
    timeout_s: float,
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """A rank's life: (error class or None, result or what the error says) through the pipe."""
    die_with_parent(parent)
    on_gpus = torch.cuda.device_count() >= n
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if not on_gpus:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        join_world(store, rank, n, timeout_s, device)
        with told_when_out(f"rank {rank}", device):
            answer = None, function(rank, device, *args)
    except OutOfMemory as error:
        answer = ConfigError, str(error)
    except Exception:  # noqa: BLE001  whatever it is, the parent raises it again
        answer = RuntimeError, f"rank {rank} of {n}: {traceback.format_exc()}"
    pipe.send(answer)
    leave_world()
