"""The game of guessing_server.py as a `rollout_func` in the form of TRL's documentation."""

import random
from typing import Any

from trl.experimental.openenv import generate_rollout_completions


def plays(prompts: list[str], trainer: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "won": []}
    for prompt in prompts:
        number, text, won, turns = random.randint(1, 3), prompt, 0.0, list[dict[str, Any]]()
        for _ in range(2):
            (turn,) = generate_rollout_completions(trainer, [text], generation_overrides={"max_tokens": 1})
            turns.append(turn)
            said = turn["text"].strip()
            if said == str(number):
                won = 1.0
                break
            text += f"{said} {'higher' if (int(said) if said.isdigit() else 0) < number else 'lower'}"
        made["prompt_ids"].append(turns[-1]["prompt_ids"])
        made["completion_ids"].append([token for turn in turns for token in turn["completion_ids"]])
        made["logprobs"].append([value for turn in turns for value in turn["logprobs"]])
        made["won"].append(won)
    return made


def won(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(each) for each in kwargs["won"]]
