"""An agent of OpenAI's Agents SDK, as one would write it: nothing in it knows of a run."""

import json
import os
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


if __name__ == "__main__":
    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel(os.environ["OPENAI_MODEL"], AsyncOpenAI())
    agent = Agent(name="adder", instructions="Add.", model=model, tools=[add])
    (message,) = json.loads(sys.stdin.readline())["prompt"]
    result = Runner.run_sync(agent, message["content"], max_turns=12)
    print(json.dumps({"reward": len(result.new_items)}))
