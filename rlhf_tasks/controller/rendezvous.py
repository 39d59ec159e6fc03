"""Where the ranks of every generation find each other: one TCPStore, held by the controller."""

import socket

from torch.distributed import TCPStore


class Rendezvous:
    """A store on one interface (a plain TCPStore listens on all). Each generation uses its own PrefixStore
    on it.

    host, port  what ranks connect to
    """

    def __init__(self, host: str) -> None:
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.bind((host, 0))
        listener.listen()
        self.host = host
        self.port: int = listener.getsockname()[1]
        self._store: TCPStore | None = TCPStore(
            host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def close(self) -> None:
        """End the store; ranks that still wait on it get an error."""
        self._store = None
