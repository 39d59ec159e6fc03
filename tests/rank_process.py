"""The processes of the `ranks` fixture: a nursery, and the ranks that it forks.

The nursery imports once what every rank needs, which takes ten times as long as anything that ranks do in tests. It
has no threads of its own, so that its copies are sound.

python rank_process.py SOCKET_FD
"""

import datetime
import faulthandler
import gc
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection

import pytest  # noqa: F401
import torch
import torch.distributed as dist
import transformers.models.llama.modeling_llama  # noqa: F401

import prefect_rlhf.rlhf_tasks.algorithms.ppo.functions
import prefect_rlhf.rlhf_tasks.rank.plan_nodes  # noqa: F401
import tests.tiny_models  # noqa: F401
from tests import rendezvous


def _end_with_parent(parent: int) -> None:
    """End this process within a second of its parent's death, even in the middle of a collective."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _run(store: dist.TCPStore, message: bytes) -> tuple[bool, object]:
    """Answer (True, result) or (False, traceback). The message is (run, rank, world, timeout_s, call)."""
    try:
        run, rank, world, timeout_s, call = pickle.loads(message)
        try:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"run-{run}", store),
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=timeout_s),
            )
        except RuntimeError as error:
            return False, f"the ranks have not found each other: {error}"
        rendezvous.port, rendezvous.prefix = store.port, f"world-of-run-{run}"
        function, args = pickle.loads(call)
        return True, function(rank, world, *args)
    except BaseException:  # noqa: BLE001  pytest's own outcomes are BaseExceptions; the parent raises it again
        return False, traceback.format_exc()


def serve(pipe: Connection, store_port: int) -> None:
    """A rank's life: run the functions that it is sent, each in fresh process groups, until the pipe is closed."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    pipe.send_bytes(b"ready")
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(pickle.dumps(_run(store, message)))
        if dist.is_initialized():  # only now: a peer that fails because we leave must not be heard first
            dist.destroy_process_group()


def main() -> None:
    """The nursery: for each port of a store that it is told, with a pipe's descriptor, fork a rank and answer its
    pid. The dead are not waited for: as long as the nursery lives, no pid stands for another process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    gc.collect()
    gc.freeze()  # a collection in a rank would look at all that is imported, and copy the pages that it shares
    orders = socket.socket(fileno=int(sys.argv[1]))
    while True:
        port, descriptors, _, _ = socket.recv_fds(orders, 64, 1)
        if not port:
            return
        pid = os.fork()
        if pid == 0:
            orders.close()
            serve(Connection(descriptors[0]), int(port))
            os._exit(0)
        os.close(descriptors[0])
        orders.send(str(pid).encode())


if __name__ == "__main__":
    main()
