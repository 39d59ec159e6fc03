"""A guessing game as a `rollout_func`, in the form of TRL's documentation: with the helper of older versions, and as
newer ones ask vLLM. Needs the real package."""

from typing import Any

import torch
from trl.data_utils import is_conversational

TURNS = 3


class Game:
    """Says of each guess how long it was, and rewards short ones."""

    def __init__(self) -> None:
        self.reward = 0.0

    def step(self, guess: str) -> str:
        self.reward += 1.0 / (1 + len(guess))
        return f"<{len(guess)}>"


def with_helper(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """As of TRL 0.26 to 1.8: each turn is a text, which has all before it."""
    from trl.experimental.openenv import generate_rollout_completions

    made: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_reward": []}
    for prompt in prompts:
        game, text, ids, logprobs = Game(), prompt, list[int](), list[Any]()
        prompt_ids = list[int]()
        for _ in range(TURNS):
            (turn,) = generate_rollout_completions(trainer, [text], generation_overrides={"max_tokens": 6})
            prompt_ids.extend(turn["prompt_ids"])
            ids.extend(turn["completion_ids"])
            logprobs.extend(turn["logprobs"])
            text += turn["text"] + game.step(turn["text"])
        made["prompt_ids"].append(prompt_ids)
        made["completion_ids"].append(ids)
        made["logprobs"].append(logprobs)
        made["env_reward"].append(game.reward)
    return made


def with_vllm(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """As of TRL 1.16: all games take a turn together, in tokens; env_mask excludes what the game says."""
    assert not is_conversational({"prompt": prompts[0]})
    tokenizer = trainer.processing_class
    games = [Game() for _ in prompts]
    prompt_ids = tokenizer(text=prompts)["input_ids"]
    ids, logprobs, mask = ([[] for _ in prompts] for _ in range(3))
    for turn in range(TURNS):
        before = [prompt + made for prompt, made in zip(prompt_ids, ids, strict=True)]
        _, drawn, values, _ = trainer.vllm_generation.generate(before, images=None, num_generations=1)
        for place, (new, alternatives) in enumerate(zip(drawn, values, strict=True)):
            said = games[place].step(tokenizer.decode(new, skip_special_tokens=True))
            observed = tokenizer(text=said, add_special_tokens=False)["input_ids"] if turn < TURNS - 1 else []
            ids[place] += [*new, *observed]
            logprobs[place] += [value for value, *_ in alternatives] + [0.0] * len(observed)
            mask[place] += [1] * len(new) + [0] * len(observed)
    rewards = torch.tensor([game.reward for game in games])
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": ids,
        "logprobs": logprobs,
        "env_mask": mask,
        "env_reward": rewards,
    }


def reward_from_env(completions: list[str], **kwargs: Any) -> list[float]:
    """The reward of the documentation's examples."""
    return [float(reward) for reward in kwargs["env_reward"]]
