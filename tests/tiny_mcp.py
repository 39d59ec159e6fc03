"""A server of tools for tests (MCP): by standard input and output, or at a port.

    tiny_mcp.py [port=N | begins=N FILE | ends | hangs | names=NAME]

begins=N FILE: it writes its process id to FILE each time it begins, and refuses to begin from the Nth time on.
"""

import os
import sys
import time
from itertools import pairwise
from pathlib import Path

from mcp.server import MCPServer
from mcp_types import ImageContent, TextContent
from pydantic import BaseModel

server = MCPServer("tiny", log_level="ERROR")


class Point(BaseModel):
    x: int
    y: int
    label: str | None = None


@server.tool()
def length(points: list[Point], scale: float = 1.0) -> float:
    """The length of a way."""
    return scale * sum(abs(a.x - b.x) + abs(a.y - b.y) for a, b in pairwise(points))


@server.tool()
def fail(text: str) -> str:
    """Fail."""
    raise ValueError(text)


@server.tool()
def leave(n: int) -> int:
    """End the server with a line, or answer 0."""
    if n:
        print("no memory is left", file=sys.stderr, flush=True)
        os._exit(n)
    return n


@server.tool()
def sleep(seconds: float) -> float:
    """Answer later."""
    time.sleep(seconds)
    return seconds


@server.tool(structured_output=False)
def key() -> list[TextContent | ImageContent]:
    """The secret, and a picture."""
    return [
        TextContent(type="text", text=os.environ.get("KEY", "none")),
        ImageContent(type="image", data="", mime_type="image/png"),
    ]


if __name__ == "__main__":
    how, _, value = "".join(sys.argv[1:2]).partition("=")
    if how == "begins":
        begun = Path(sys.argv[2])
        begun.write_text(f"{begun.read_text() if begun.exists() else ''}{os.getpid()}\n")
        if len(begun.read_text().split()) >= int(value):
            sys.exit("it does not begin again")
    if how == "ends":
        sys.exit("the key has expired")
    if how == "hangs":
        time.sleep(1000)
    if how == "names":
        server.add_tool(lambda: 0, name=value, description="A name.")
    if how == "port":
        server.run("streamable-http", port=int(value))
    else:
        server.run()
