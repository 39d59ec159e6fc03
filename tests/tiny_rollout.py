"""Functions of TRL's form that play episodes, `rollout_func(prompts, trainer)`. They load no package."""

import os
import random
import time
from collections.abc import Callable
from typing import Any

HINT = [5, 6, 7]  # tokens of what the environment says


def plays(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Three turns, in tokens: after each the environment says something, which env_mask excludes."""
    client, turns = trainer.vllm_generation.vllm_client, random.randint(2, 3)
    assert (len(prompts), trainer.num_generations, trainer.args.top_k) == (1, 1, trainer.top_k)
    drawn: dict[str, Any] = client.generate(prompts, max_tokens=4, temperature=trainer.temperature)
    (begun,) = drawn["prompt_ids"]
    ids, logprobs, mask = list[int](), list[float](), list[int]()
    for turn in range(turns):
        if turn:
            ids, logprobs, mask = ids + HINT, logprobs + [0.0] * 3, mask + [0] * 3
            drawn = client.generate([begun + ids], max_tokens=4)
            assert drawn["prompt_ids"] == [begun + ids]
        (new,), (values,) = drawn["completion_ids"], drawn["logprobs"]
        ids, logprobs = ids + new, logprobs + [value for (value,) in values]
        mask += [1] * len(new)
    return {
        "prompt_ids": [begun],
        "completion_ids": [ids],
        "logprobs": [logprobs],
        "env_mask": [mask],
        "env_reward": [len(ids) / 16],
        "hints": [turns - 1],
        "game": "guessing",
    }


def _changed(change: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    def function(prompts: list[str], trainer: Any) -> Any:
        returned = plays(prompts, trainer)
        changed = change(returned)
        return returned if changed is None else changed

    return function


lacks = _changed(lambda returned: returned.pop("logprobs") and None)
several = _changed(lambda returned: {**returned, "completion_ids": returned["completion_ids"] * 8})
short = _changed(lambda returned: {**returned, "env_mask": [[1]]})
unmasked = _changed(lambda returned: {**returned, "env_mask": None})
forgets = _changed(
    lambda returned: {
        **returned,
        **{key: [returned[key][0][:-1]] for key in ("completion_ids", "logprobs", "env_mask")},
    }
)
flat = _changed(lambda returned: {**returned, "completion_ids": [7]})
listed = _changed(lambda returned: [returned])
odd = _changed(lambda returned: {**returned, "environment": [object()]})
unrewarded = _changed(lambda returned: returned.pop("env_reward") and None)
words = _changed(lambda returned: {**returned, "env_reward": ["much"]})


def raises(prompts: list[str], trainer: Any) -> Any:
    trainer.vllm_generation.generate([[5, 6]], None, 1)
    raise KeyError("no such door")


def kills(prompts: list[str], trainer: Any) -> Any:
    """Ends the process that has forked it."""
    os.kill(os.getppid(), 9)
    return plays(prompts, trainer)


def sleeps(prompts: list[str], trainer: Any) -> Any:
    plays(prompts, trainer)
    time.sleep(600)


def reaches(prompts: list[str], trainer: Any) -> Any:
    return trainer.model.generate(prompts)


def greedy(prompts: list[str], trainer: Any) -> Any:
    return trainer.vllm_generation.vllm_client.generate(prompts, temperature=0.0)


def narrow(prompts: list[str], trainer: Any) -> Any:
    return trainer.vllm_generation.vllm_client.generate(prompts, top_k=3)


def stranger(prompts: list[str], trainer: Any) -> Any:
    return trainer.vllm_generation.generate([[10**6]], None, 1)


def env_reward(completions: list[str], env_reward: list[float], hints: list[int], game: list[str], **_: Any):
    """As in TRL's documentation: the reward is a field."""
    assert set(game) == {"guessing"}
    return [value + 10 * count for value, count in zip(env_reward, hints, strict=True)]


def moody(prompts: list[str], trainer: Any) -> Any:
    return random.choice([plays, raises])(prompts, trainer)


def endless(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Four turns, each as long as a response may be: what has no room is empty."""
    ids, read = list[int](), [5, 6]
    for _ in range(4):
        drawn = trainer.vllm_generation.generate([read + ids], None, 1)
        ids += drawn[1][0]
    return {"prompt_ids": [read], "completion_ids": [ids], "logprobs": None, "env_reward": [1]}
