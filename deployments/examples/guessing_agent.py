"""An agent: it plays a guessing game with the policy that a run trains (docs/how-to/agents.md).

Any program that speaks OpenAI's API would do. This one needs the standard library only, so it starts at once.
"""

import json
import os
import random
import re
import sys
from urllib.request import Request, urlopen

NUMBERS, GUESSES = 3, 2


def complete(text: str) -> str:
    """The token that the policy writes after a text."""
    request = Request(
        f"{os.environ['OPENAI_BASE_URL']}/completions",
        json.dumps({"prompt": text, "max_tokens": 1}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urlopen(request) as answer:
        return json.load(answer)["choices"][0]["text"]


def play(text: str, number: int) -> float:
    """1 where the policy finds the number, which is from 1 to NUMBERS, with GUESSES guesses; else 0."""
    for _ in range(GUESSES):
        said = complete(text)
        guess = re.search("[0-9]+", said)
        if guess and int(guess[0]) == number:
            return 1.0
        hint = "number" if guess is None else "higher" if int(guess[0]) < number else "lower"
        text += f"{said} {hint} "
    return 0.0


if __name__ == "__main__":
    row = json.loads(sys.stdin.readline())
    drawn = random.Random(int(os.environ["AGENT_SEED"])).randint(1, NUMBERS)
    print(json.dumps({"reward": play(row["prompt"], row.get("number", drawn))}))
