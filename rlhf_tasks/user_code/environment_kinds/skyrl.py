"""skyrl-gym's environments: `skyrl:NAME`, or `skyrl:file.py:Class` of a `BaseTextEnv` of the user's.

Rows are those of SkyRL's data sets: `prompt`, and what the environment reads of the other columns (`reward_spec`,
`extra_info`). kwargs become its `env_config`.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from collections.abc import Mapping
from typing import Any

import skyrl_gym
from omegaconf import OmegaConf

from prefect_rlhf.rlhf_tasks.user_code.environment_kinds.starts import named, written


class Environment:
    """An environment, made for its row."""

    def __init__(self, name: str, **kwargs: Any) -> None:
        self._name, self._class, self._kwargs = name, named(name, "environment"), kwargs

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        extras = {key: value for key, value in row.items() if key != "prompt" and value is not None}
        config, prompt = OmegaConf.create(self._kwargs), row["prompt"]
        self._made = (
            skyrl_gym.make(self._name, env_config=config, extras=extras)
            if self._class is None
            else self._class(env_config=config, extras=extras)
        )
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        begun, _ = self._made.init(messages)
        if begun != messages:
            raise ValueError(
                f"its init changes the prompt to {written(begun)[:80]!r}. Write that prompt in the row: the policy "
                "reads what is there."
            )

    def step(self, text: str) -> tuple[str, float, bool]:
        """(what it observes, its reward, whether it is over)"""
        output = self._made.step(text)
        if output["done"]:
            self._made.close()
        return written(output["observations"]), output["reward"], output["done"]
