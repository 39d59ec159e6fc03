"""Two hosts on this machine: network namespaces with addresses of their own, joined by a switch."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

INTERFACE = "eth0"


class Host(NamedTuple):
    """A network namespace.

    inside   what stands before a command that runs there
    address  its IPv4 address on INTERFACE
    """

    inside: tuple[str, ...]
    address: str


class TwoHosts(NamedTuple):
    """Both hosts, and the namespace of the switch between them."""

    first: Host
    second: Host
    switch: str

    def cut_off_second(self) -> None:
        """Nothing goes to or from the second host any more; its processes continue."""
        _ip("-n", self.switch, "link", "set", "second", "down")

    def join_second(self) -> None:
        """The second host is back."""
        _ip("-n", self.switch, "link", "set", "second", "up")


@contextmanager
def two_hosts(shared: Path) -> Iterator[TwoHosts]:
    """Make the two hosts; skip the test where namespaces may not be made.

    shared  a folder that processes of both may use (both see the file system of this machine)
    """
    assert shared.exists()
    base = f"rlhf{os.getpid()}"
    names = {part: f"{base}-{part}" for part in ("switch", "first", "second")}
    try:
        try:
            for name in names.values():
                _ip("netns", "add", name)
            switch = ("-n", names["switch"], "link")
            _ip(*switch, "add", "bridge", "type", "bridge")
            _ip(*switch, "set", "bridge", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces may not be made here: {error}")
        hosts = []
        for number, part in enumerate(("first", "second"), 1):
            _ip(*switch, "add", part, "type", "veth", "peer", "name", INTERFACE, "netns", names[part])
            _ip(*switch, "set", part, "master", "bridge")
            _ip(*switch, "set", part, "up")
            address = f"10.77.0.{number}"
            _ip("-n", names[part], "addr", "add", f"{address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _ip("-n", names[part], "link", "set", interface, "up")
            hosts.append(Host(("ip", "netns", "exec", names[part]), address))
        yield TwoHosts(*hosts, names["switch"])
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
