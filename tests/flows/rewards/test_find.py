"""Rewards and environments are checked from their source before a run."""

import sys

import pytest

from prefect_rlhf.flows.rewards import check_agent, check_environment, check_rewards, literal_secrets
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, make_config, resolve_paths
from prefect_rlhf.rlhf_tasks.config.responses import AgentConfig, EnvironmentConfig, RewardConfig
from tests.flows.checked_files import refused

ROLLOUT = {
    "type": "rollout",
    "models": {"actor": "m"},
    "data": {"train": "d"},
    "sampling": {"max_completion_length": 4},
}


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        ("HERE/nowhere.py:good", ("nowhere.py cannot be read (No such file or directory)",)),
        ("HERE/rewards.py:bad", ("has no function 'bad' (functions there: good)",)),
        ("no_such_module_here:f", ("there is no module 'no_such_module_here'",)),
        ("json.nothing.here:f", ("there is no module 'json.nothing.here'",)),
        ("json.decoder:nothing", ("has no function 'nothing'", "py_scanstring")),
    ],
)
def test_a_reward_that_cannot_be_found_is_refused(call, document, tmp_path, function, parts):
    document["rewards"] = [{"function": function.replace("HERE", str(tmp_path))}]
    refused(call, *parts)


@pytest.mark.parametrize(
    ("name", "kwargs", "parts"),
    [
        (
            "judge",
            {"url": "https://a.org", "model": "m", "against": "refrence"},
            ("names the column 'refrence'",),
        ),
        ("judge", {"model": "m"}, ("names neither kwargs.url, a service, nor a model of the run",)),
        ("judge", {"url": "https://a.org"}, ("model=None is not a text",)),
        ("right", {}, ("no reward of that name is built in", "exact_match, format, judge, length")),
        ("exact_match", {}, ("none of the columns answer, solution", "data.column_map")),
        ("format", {"pattern": "("}, ("'(' is no regular expression",)),
        ("length", {"moist": 3}, ("'moist'",)),
    ],
)
def test_a_built_in_reward_is_refused_before_the_run_for_what_it_cannot_use(
    call, document, name, kwargs, parts
):
    document["rewards"] = [{"function": f"builtin:{name}", "kwargs": kwargs}]
    refused(call, *parts)


def test_a_services_secrets_are_looked_for_and_literal_ones_warned_of(monkeypatch):
    monkeypatch.delenv("MY_LOGIN", raising=False)
    named = RewardConfig(url="https://host/judge", headers={"Authorization": {"env": "MY_LOGIN"}})
    with pytest.raises(
        ConfigError, match=r"reward https://host/judge: .* variable 'MY_LOGIN' for Authorization"
    ):
        check_rewards([named], (), is_here=True)
    literal = RewardConfig(url="https://host/judge", headers={"Authorization": "Bearer x"})
    check_rewards([literal], (), is_here=True)
    (warning,) = literal_secrets(make_config(ROLLOUT | {"rewards": [literal.model_dump()]}))
    assert warning.startswith("rewards.0.headers.Authorization is given in the configuration")


def test_a_reward_may_be_bound_in_any_way(tmp_path):
    file = tmp_path / "r.py"
    file.write_text(
        "import x as imported\nif True:\n    def inside(): ...\n"
        "try:\n    from y import tried\nexcept ImportError:\n    tried = None\nassigned = lambda: 0\n"
        "def outer(completions):\n    hidden = 1\n"
    )
    for name in ("imported", "inside", "tried", "assigned", "outer"):
        check_rewards([RewardConfig(function=f"{file}:{name}")], (), True)
    with pytest.raises(ConfigError, match="no function 'hidden'"):
        check_rewards([RewardConfig(function=f"{file}:hidden")], (), True)
    file.write_text("def broken(:\n")
    with pytest.raises(ConfigError, match="not valid Python"):
        check_rewards([RewardConfig(function=f"{file}:broken")], (), True)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that says so when it is imported."""
    folder = tmp_path / "path" / "their_package" / "inner"
    folder.mkdir(parents=True)
    told = f"open({str(tmp_path / 'imported')!r}, 'w')\n"
    for place in (folder.parent / "__init__.py", folder / "__init__.py"):
        place.write_text(told)
    (folder / "rewards.py").write_text(f"{told}def good(completions, **kwargs): ...\n")
    monkeypatch.syspath_prepend(tmp_path / "path")
    return tmp_path


def test_a_dotted_reward_is_found_without_importing_the_packages_around_it(call, document, package):
    document["rewards"] = [{"function": "their_package.inner.rewards:good"}]
    assert call("config", "validate", "FILE")[0] == 0
    document["rewards"] = [{"function": "their_package.inner.rewards:bad"}]
    refused(call, "has no function 'bad' (functions there: good)", command=("config", "validate", "FILE"))
    document["rewards"] = [{"function": "their_package.nothing:good"}]
    refused(call, "there is no module 'their_package.nothing'", command=("config", "validate", "FILE"))
    assert not (package / "imported").exists()
    assert not {name for name in sys.modules if name.startswith("their_package")}


def test_a_package_that_says_itself_where_its_modules_are_is_left_to_the_reward_process(
    call, document, package
):
    (package / "path/their_package/__init__.py").write_text("__path__ = ['/nowhere/yet']\n")
    document["rewards"] = [{"function": "their_package.generated.rewards:good"}]
    assert call("config", "validate", "FILE")[0] == 0


def test_folders_without_an_init_are_packages_too(call, document, tmp_path, monkeypatch):
    folder = tmp_path / "path" / "their_folder" / "inner"
    folder.mkdir(parents=True)
    (folder / "rewards.py").write_text("def good(completions): ...\n")
    (tmp_path / "path" / "their_folder" / "beside.py").write_text("def good(completions): ...\n")
    monkeypatch.syspath_prepend(tmp_path / "path")
    for sound in ("their_folder.inner.rewards:good", "their_folder.beside:good"):
        document["rewards"] = [{"function": sound}]
        assert call("config", "validate", "FILE")[0] == 0
    for place, words in (
        ("inner.rewards:bad", "has no function 'bad'"),
        ("none.at:all", "there is no module"),
    ):
        document["rewards"] = [{"function": f"their_folder.{place}"}]
        refused(call, words, command=("config", "validate", "FILE"))
    assert "their_folder" not in sys.modules


@pytest.mark.parametrize(
    ("source", "settings", "parts"),
    [
        ("def f(completions, **kwargs): ...", {}, None),
        ("async def f(solution_str, ground_truth): ...", {}, None),
        ("def f(queries, prompts, labels): ...", {}, None),
        ("def f(**kwargs): ...", {}, None),
        ("def f(prompts, completions, trainer_state, log_extra, log_metric): ...", {}, None),
        ("class f:\n    def __call__(self, first): ...", {}, None),
        ("def f(first, second): ...", {}, ("takes (first, second).", "(prompts, completions, **columns)")),
        (
            "def f(completions, truth): ...",
            {},
            ("'truth' is neither a column of the rows (which have", "column_map"),
        ),
        ("def f(completions, *, truth): ...", {}, ("'truth' is neither a column",)),
        ("def f(completions, truth): ...", {"truth": 1}, None),
        (
            "def f(completions, truth=1): ...",
            {"turth": 1},
            ("no parameter 'turth'", "(it takes completions, truth)"),
        ),
        (
            "def f(completions, key): ...",
            {"key": {"env": "NOT_SET"}},
            ("'NOT_SET' for key, which is not set",),
        ),
        ("def f(completions, key): ...", {"key": {"block": "mine"}}, None),
    ],
)
def test_parameters_are_checked_in_the_source(call, document, tmp_path, source, settings, parts):
    (tmp_path / "rewards.py").write_text(f"import a_thing_that_is_not_there\n{source}\n")
    document["rewards"] = [{"function": f"{tmp_path / 'rewards.py'}:f", "kwargs": settings}]
    if parts is None:
        assert call("config", "validate", "FILE")[0] == 0
    else:
        refused(call, *parts, command=("config", "validate", "FILE"))


def test_a_secret_that_stands_in_the_configuration_is_warned_of(call, document, tmp_path):
    (tmp_path / "rewards.py").write_text("def f(completions, api_key): ...\n")
    document["rewards"] = [{"function": f"{tmp_path / 'rewards.py'}:f", "kwargs": {"api_key": "abc-123"}}]
    status, _, err = call("config", "validate", "FILE")
    assert status == 0
    assert "warning: rewards.0.kwargs.api_key is given in the configuration, which runs write to disk." in err
    assert "api_key: {env: VARIABLE}" in err
    assert "abc-123" not in err


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
        ("builtin:Hall", "no environment of that name is built in. There are Calculator, GuessingGame."),
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


@pytest.mark.parametrize(
    "command", ["python nowhere.py", "python3.12 -u nowhere.py other.py", "env python3 nowhere.py"]
)
def test_a_file_that_the_agents_python_runs_is_there(command):
    with pytest.raises(ConfigError, match=r"agent.command: there is no file nowhere.py. Correct the path."):
        check_agent(AgentConfig(command=command.replace("python3.12", sys.executable)))


@pytest.mark.parametrize(
    "command", [f"python {__file__} nowhere.py", "python -m tests nowhere.py", "cat nowhere.py"]
)
def test_other_words_of_an_agents_command_may_name_files_that_it_writes(command):
    check_agent(AgentConfig(command=command))


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("def other(): ...", r"rollout.py has no 'rollout'. Name a function: trl:file.py:function."),
        ("def rollout(prompts): ...", r"it takes \(prompts\). Give it the parameters \(prompts, trainer\)."),
        ("def rollout(prompts, trainer, game): ...", r"it takes \(prompts, trainer, game\)."),
        ("def rollout(prompts, trainer, game=None): ...", ""),
        ("from theirs import rollout", ""),
    ],
)
def test_a_rollout_func_is_looked_up_in_its_source(tmp_path, code, sentence):
    (tmp_path / "rollout.py").write_text(code)
    config = make_config({**ROLLOUT, "agent": {"command": "trl:rollout.py:rollout"}})
    agent = resolve_paths(config, tmp_path).agent
    if not sentence:
        check_agent(agent)
        return
    with pytest.raises(ConfigError, match=sentence):
        check_agent(agent)


def test_what_a_rollout_func_returns_for_rewards_is_not_known_before(tmp_path):
    (tmp_path / "rewards.py").write_text("def env(completions, env_reward): ...")
    reward = RewardConfig(function=f"{tmp_path}/rewards.py:env")
    check_rewards([reward], [], is_here=True, agent=AgentConfig(command="trl:rollout.py:rollout"))
    with pytest.raises(ConfigError, match="its parameter 'env_reward' is neither a column"):
        check_rewards([reward], [], is_here=True, agent=AgentConfig(command="python agent.py"))
