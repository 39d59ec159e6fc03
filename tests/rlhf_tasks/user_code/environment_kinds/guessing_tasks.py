"""The game of guessing_server.py for verifiers, whose environment plays the user. Numbers take turns."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Guessing", "GuessingEnv"]


class GameData(vf.TaskData):
    number: int


class Game(vf.Task[GameData, vf.State, vf.TaskConfig]):
    pass


class GuessingEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessingEnv(vf.Env[GuessingEnvConfig]):
    async def run(self, task, agents):
        won = 0.0
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn()
            for left in (1, 0):
                said = segment.last_reply
                guess = int(said) if said.isdigit() else 0
                if guess == task.data.number:
                    won = 1.0
                if won or not left:
                    break
                segment = await talk.turn("higher" if guess < task.data.number else "lower")
        talk.trace.record_reward("won", won)


class Guessing(vf.Taskset[Game, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[Game]:
        place = 0
        while True:
            yield Game(GameData(prompt="guess: ", number=1 + place % 3), self.config.task)
            place += 1
