"""TextArena's games for one player: `textarena:NAME`, or `textarena:file.py:Class` of a game of the user's.

The policy reads what the game says after its move. TextArena's own wrappers would repeat the whole game each turn.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import textarena as ta

from prefect_rlhf.rlhf_tasks.user_code.environment_kinds.random_state import RandomState
from prefect_rlhf.rlhf_tasks.user_code.environment_kinds.starts import (
    START,
    named,
    refuse_other_prompt,
    row_of,
)

PLAYER = 0


class Environment:
    """A game. kwargs: of the game; its rows' start is the seed of all that is random in it"""

    def __init__(self, name: str, **kwargs: Any) -> None:
        game = named(name, "game")
        self._game = ta.make(name, **kwargs) if game is None else game(**kwargs)

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        refuse_other_prompt(row, self.begun(row.get(START, seed)))

    def begun(self, seed: int) -> list[dict[str, str]]:
        """What the policy reads first."""
        self._random = RandomState(seed)
        with self._random.used():
            self._game.reset(num_players=1, seed=seed)
        return [{"role": "user", "content": self._said()}]

    def step(self, text: str) -> tuple[str, float, bool]:
        """(what the game says to a move, the game's reward at its end, whether it is over)"""
        with self._random.used():
            done, _ = self._game.step(text)
        if not done:
            return self._said(), 0.0, False
        rewards, _ = self._game.close()
        return "", float(rewards[PLAYER]), True

    def _said(self) -> str:
        inner = self._game
        while isinstance(inner, ta.Wrapper):
            inner = inner.env
        _, said = inner.get_observation()
        return "\n".join(text for speaker, text, _ in said if speaker != PLAYER)


def starts(name: str, kwargs: Mapping[str, Any], first: int) -> Iterator[dict[str, Any]]:
    """A row for each seed from `first` on."""
    for seed in itertools.count(first):
        yield row_of(seed, Environment(name, **kwargs).begun(seed))
