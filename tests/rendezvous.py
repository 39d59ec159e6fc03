"""Where ranks of the `ranks` fixture meet when they leave its world for one of their own."""

from datetime import timedelta

import torch.distributed as dist

port = 0
"""Of the pool's store, on 127.0.0.1. tests/rank_process.py sets it and `prefix` before each call."""

prefix = ""
"""No two calls of `ranks.run` have the same, nor have a call and its second attempt on new ranks: a key that the
first has left would send the second to ports that nobody listens at."""


def store() -> dist.Store:
    """A store of this call's own."""
    client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=120))
    return dist.PrefixStore(prefix, client)
