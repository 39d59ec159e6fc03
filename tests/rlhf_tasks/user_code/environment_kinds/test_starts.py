"""Which environments are of a package, and what is said where it is missing."""

from importlib.metadata import PackageNotFoundError

import pytest

from prefect_rlhf.flows.rewards import check_environment
from prefect_rlhf.rlhf_tasks.config import packages
from prefect_rlhf.rlhf_tasks.config.responses import EnvironmentConfig
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError
from prefect_rlhf.rlhf_tasks.user_code.environment_kinds.starts import refuse_other_prompt, row_of

GAME = EnvironmentConfig(factory="textarena:Wordle-v0")


@pytest.mark.parametrize(
    ("factory", "kind", "name"),
    [
        ("textarena:Wordle-v0", "textarena", "Wordle-v0"),
        ("openenv:http://127.0.0.1:8000/", "openenv", "openenv"),
        ("verifiers:owner/set", "verifiers", "set"),
        ("trl:rooms/vault.py:Vault", "trl", "Vault"),
        ("rooms/vault.py:Vault", None, "Vault"),
        ("textarenas:Game", None, "Game"),
    ],
)
def test_a_factory_that_begins_with_a_package_is_an_environment_of_it(factory, kind, name):
    environment = EnvironmentConfig(factory=factory)
    assert (environment.kind, environment.name) == (kind, name)


@pytest.mark.parametrize("factory", ["texts:Wordle-v0", "textarena:", "textarena:a b"])
def test_other_names_are_no_environment(factory):
    with pytest.raises(ValueError, match="factory"):
        EnvironmentConfig(factory=factory)


@pytest.mark.parametrize(
    ("version", "is_right"), [("0.7.4", True), ("0.7.12", True), ("0.70.0", False), ("1.7.0", False)]
)
def test_a_package_of_another_version_is_refused_before_the_run_where_it_runs(monkeypatch, version, is_right):
    monkeypatch.setattr(packages, "version", lambda name: version)
    if is_right:
        assert check_environment(GAME, is_here=True) == []
        return
    with pytest.raises(ConfigError) as told:
        check_environment(GAME, is_here=True)
    assert str(told.value) == (
        f"environment textarena:Wordle-v0: textarena {version} is installed, but 0.7 is needed. "
        'Run `pip install "textarena~=0.7.0"`.'
    )
    assert check_environment(GAME, is_here=False) == []


def test_so_is_one_that_is_not_installed(monkeypatch):
    def version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(packages, "version", version)
    with pytest.raises(ConfigError, match=r"the package textarena is not installed. Run `pip install"):
        check_environment(GAME, is_here=True)
    assert check_environment(EnvironmentConfig(factory="trl:vault.py:Vault"), is_here=True) == [], (
        "it loads none"
    )


def test_a_prompt_is_compared_as_text_and_only_where_the_row_has_a_start():
    said = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    row = row_of(3, said)
    refuse_other_prompt(row, said)
    refuse_other_prompt({**row, "prompt": "a\n\nb"}, said)
    refuse_other_prompt({"prompt": "mine"}, said)
    with pytest.raises(ValueError, match="at start 3, not with the row's prompt"):
        refuse_other_prompt({**row, "prompt": "a\n\nc"}, said)
