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
    assert check_environment(EnvironmentConfig(factory=f"{tmp_path}/rooms.py:{name}"), True) == []
    assert check_environment(EnvironmentConfig(factory="builtin:GuessingGame"), True) == []


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
        check_environment(EnvironmentConfig(factory=factory.format(tmp_path)), True)
    assert sentence in str(caught.value)


def test_its_secrets_are_looked_for_and_literal_ones_warned_of(monkeypatch):
    named = EnvironmentConfig(factory="builtin:GuessingGame", kwargs={"pwd": {"env": "MY_PWD"}})
    monkeypatch.delenv("MY_PWD", raising=False)
    with pytest.raises(ConfigError, match=r"environment builtin:GuessingGame: .* variable 'MY_PWD' for pwd"):
        check_environment(named, is_here=True)
    assert check_environment(named, is_here=False) == []
    literal = named.model_copy(update={"kwargs": {"pwd": "x"}})
    (warning,) = check_environment(literal, is_here=True)
    assert warning.startswith("environment.kwargs.pwd is given in the configuration")
