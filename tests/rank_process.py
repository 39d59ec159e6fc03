"""One rank process of the `ranks` fixture: runs the functions that it is sent, each in fresh process groups.

python rank_process.py PIPE_FD STORE_PORT
"""

import datetime
import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist


def _end_with_parent(parent: int) -> None:
    """End this process within a second of its parent's death, even in the middle of a collective."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _run(store: dist.Store, message: bytes) -> tuple[bool, object]:
    """Answer (True, result) or (False, traceback). The message is (run, rank, world, timeout_s, call)."""
    try:
        run, rank, world, timeout_s, call = pickle.loads(message)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"run-{run}", store),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        function, args = pickle.loads(call)
        return True, function(rank, world, *args)
    except BaseException:  # noqa: BLE001  pytest's own outcomes are BaseExceptions; the parent raises it again
        return False, traceback.format_exc()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)
    pipe = Connection(int(sys.argv[1]))
    store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), is_master=False)
    pipe.send_bytes(b"ready")
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(pickle.dumps(_run(store, message)))
        if dist.is_initialized():  # only now: a peer that fails because we leave must not be heard first
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
