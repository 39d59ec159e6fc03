"""A guessing game behind an OpenEnv server on loopback; its port is in the file that the first argument names.

A number from 1 to 3 is drawn from the episode's seed. A wrong guess is answered with a hint; there are two guesses.
"""

import random
import socket
import sys
from pathlib import Path

import uvicorn
from openenv.core import Action, Environment, Observation, State, create_app

SESSIONS = 512


class Guess(Action):
    text: str


class Hint(Observation):
    said: str = ""


class Game(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._number, self._left = random.Random(seed).randint(1, 3), 2
        return Hint(said="guess: ")

    def step(self, action, timeout_s=None, **kwargs):
        self._left -= 1
        if action.text.strip() == str(self._number):
            return Hint(said="right", done=True, reward=1.0)
        guess = int(action.text) if action.text.strip().isdigit() else 0
        return Hint(said="higher" if guess < self._number else "lower", done=not self._left, reward=0.0)

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    listening = socket.create_server(("127.0.0.1", 0), backlog=SESSIONS)
    served = uvicorn.Server(
        uvicorn.Config(create_app(Game, Guess, Hint, max_concurrent_envs=SESSIONS), log_level="error")
    )
    port = Path(sys.argv[1])
    port.with_suffix(".new").write_text(str(listening.getsockname()[1]))
    port.with_suffix(".new").rename(port)
    served.run(sockets=[listening])
