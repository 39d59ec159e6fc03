"""Where the ranks of a run find each other."""

import socket

from torch.distributed import TCPStore


class Rendezvous:
    """The controller's TCPStore, through which the ranks of each generation find each other.

    It listens on one interface, whereas a plain TCPStore listens on all. Each generation uses its own PrefixStore.

    host, port  the address that ranks connect to
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
        """Close the store. Ranks that still wait on it get an error."""
        self._store = None
