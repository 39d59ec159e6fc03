"""An agent of smolagents that writes code, as one would write it: nothing in it knows of a run."""

import json
import os
import sys

from smolagents import CodeAgent, OpenAIModel, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One of them.
        b: The other.
    """
    return a + b


if __name__ == "__main__":
    model = OpenAIModel(os.environ["OPENAI_MODEL"], max_tokens=24)
    agent = CodeAgent([add], model, max_steps=2, verbosity_level=0)
    agent.prompt_templates["system_prompt"] = "Add."
    (message,) = json.loads(sys.stdin.readline())["prompt"]
    agent.run(message["content"])
    print(json.dumps({"reward": len(agent.memory.steps)}))
