"""How the policy plays in verifiers: a loop of chat and tools, in the process of the environment.

verifiers' own harnesses are programs, which begin a process and install packages for each episode.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import json
import ssl
from contextlib import AsyncExitStack
from typing import Any

import httpx
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness, HarnessConfig
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

__all__ = ["PolicyHarness"]

CERTIFICATES = ssl.create_default_context()  # read once: a client without them would read them in each turn


class PolicyHarness(Harness[HarnessConfig]):
    """Asks the policy until it calls no tool, through verifiers' own endpoint, which records the conversation."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += map(message_to_wire, prompt or ())
        servers = {"mcpServers": {name: {"url": url, "timeout": None} for name, url in mcp_urls.items()}}
        async with (
            AsyncExitStack() as stack,
            httpx.AsyncClient(
                timeout=None, headers={"Authorization": f"Bearer {secret}"}, verify=CERTIFICATES
            ) as client,
        ):
            tools, places, connected = await connect_mcp(servers, stack)
            body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
            while True:
                reply = await client.post(f"{endpoint}/chat/completions", json=body)
                if reply.is_error:  # such as a stop of the environment's, which verifiers has noted
                    return ProgramResult(1, "", reply.text)
                message = reply.json()["choices"][0]["message"]
                messages.append({key: value for key, value in message.items() if value is not None})
                for call in message.get("tool_calls") or ():
                    content = await _answer(call["function"], places, connected)
                    messages.append(
                        {
                            "role": "tool",
                            "tool_call_id": call["id"],
                            "name": call["function"]["name"],
                            "content": content,
                        }
                    )
                if not message.get("tool_calls"):
                    return ProgramResult(0, "", "")


async def _answer(called: dict[str, Any], places: Any, servers: Any) -> Any:
    try:
        arguments = json.loads(called["arguments"])
    except ValueError:
        return called["arguments"]  # a malformed call: the adapter has written what is wrong with it
    return await call_mcp(servers, places, called["name"], arguments)
