"""An environment is checked from its source before a run."""

import pytest

from flows.rewards.find import check_environment
from rlhf_tasks.algorithms.configurations import ConfigError
from rlhf_tasks.config.rewards import EnvironmentConfig

ROOMS = """
raise RuntimeError("the source is read, not run")
class Whole:
    def reset(self, row, seed): ...
    async def step(self, text): ...
class Half:
    def reset(self, row, seed): ...
class Heir(Half): ...
def made(): ...
"""


@pytest.mark.parametrize("name", ["Whole", "Heir", "made"])
def test_what_may_be_an_environment_is_taken(tmp_path, name):
    (tmp_path / "rooms.py").write_text(ROOMS)
    check_environment(EnvironmentConfig(factory=f"{tmp_path}/rooms.py:{name}"))
    check_environment(EnvironmentConfig(factory="builtin:GuessingGame"))


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        ("{}/rooms.py:Half", "Half has no method 'step'. Give it reset(row, seed) and step(text)."),
        ("{}/rooms.py:Hall", "rooms.py has no 'Hall'. Name a class or a function."),
        ("{}/halls.py:Hall", "halls.py cannot be read (No such file or directory). Name an existing file."),
        ("no_such_module:Hall", "there is no module 'no_such_module'. Install it, or name a file"),
        ("builtin:Hall", "there is none of that name. Built in are Calculator, GuessingGame."),
    ],
)
def test_what_is_none_is_refused(tmp_path, factory, sentence):
    (tmp_path / "rooms.py").write_text(ROOMS)
    with pytest.raises(ConfigError, match="environment") as caught:
        check_environment(EnvironmentConfig(factory=factory.format(tmp_path)))
    assert sentence in str(caught.value)
