"""The environments of tests' runs, by themselves: an environment process that imports them loads no torch."""

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Echo:
    """Answers with how long each turn was, for as many turns as the seed says: cheap and deterministic.

    counted  file that gets a line for each call of reset
    wait_s   seconds that a step waits, the longer the earlier its sample
    most     turns of the longest episodes
    """

    def __init__(self, counted: str | None = None, wait_s: float = 0.0, most: int = 3) -> None:
        self._counted, self._wait_s, self._most = counted, wait_s, most

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        self._left, self._answer = 1 + seed % self._most, row["answer"]
        if self._counted:
            with Path(self._counted).open("a") as file:
                file.write(json.dumps(seed) + "\n")

    async def step(self, text: str) -> tuple[str, float, bool]:
        await asyncio.sleep(self._wait_s * self._left)
        self._left -= 1
        return f"<{len(text)}>", len(text) / 16 - (self._answer in text), self._left == 0


class Moody(Echo):
    """Echo, but in some episodes of its choice it raises, in others what it says at its last turn is long."""

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        super().reset(row, seed)
        self._mood = seed // 3 % 4

    async def step(self, text: str) -> tuple[str, float, bool]:
        said, reward, done = await super().step(text)
        if done and self._mood == 0:
            raise ValueError("in a mood")
        return (99 * said, reward, False) if done and self._mood == 1 else (said, reward, done)


class Forgetful(Echo):
    """Echo, which also says who plays."""

    async def step(self, text: str) -> tuple[str, float, bool]:
        said, reward, done = await super().step(text)
        return f"{said}{os.getpid()}", reward, done
