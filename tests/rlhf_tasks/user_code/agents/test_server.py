"""The server of agents: how an answer and the end of its episode meet."""

import asyncio
from typing import Any

from prefect_rlhf.rlhf_tasks.user_code.agents.chat_api import Choice, Drawing, Limits
from prefect_rlhf.rlhf_tasks.user_code.agents.server import Agents

ANSWER = {"choices": [Choice("b", "b", "stop", ["b"], [-1.0])], "prompt_tokens": 1}


def test_an_episode_ends_though_an_answer_arrives_at_the_same_moment(monkeypatch):
    begin = {"command": ["unused"], "limits": Limits(1, 9.0, 64, 1 << 30), "drawing": Drawing(1.0, 1.0)}
    agents = Agents({**begin, "tool_format": None}, None)  # type: ignore[arg-type]
    played: Any = {}
    said: list[Any] = []

    async def asks_and_ends(episode):
        played[episode.sample] = asyncio.ensure_future(agents._answered(episode, {"prompt": "a"}, False))
        if episode.sample == 0:  # its end, and the answer of the rank, come before the request reads it
            await asyncio.sleep(0)
            await agents.answered({"answers": [(0, ANSWER)], "episodes": [], "pieces": []}, said.append)
        return None, "was late"

    monkeypatch.setattr(agents, "_outcome", asks_and_ends)

    async def play():
        request = {"answers": [], "episodes": [(0, "{}", 1), (1, "{}", 1)], "pieces": []}
        serving = asyncio.ensure_future(agents.answered(request, said.append))
        async with asyncio.timeout(20):
            while sum(len(each["ended"]) for each in said) < 2:
                await asyncio.sleep(0.01)
        serving.cancel()

    asyncio.run(play())
    assert [each["fault"] for one in said for each in one["ended"]] == ["was late", "was late"]
