"""Environments of TRL's form, whose methods are tools; what counts as a tool is as in TRL's own trainer."""

import json
import subprocess
import sys

import pytest

from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError

pytestmark = pytest.mark.cluster
CODE = '''
import random


class Vault:
    """A number is hidden, and a tool says whether a guess is too low."""

    def reset(self, **kwargs):
        self.number = kwargs.get("number") or random.randint(1, 1000)
        self.tries = 0
        return "Open the vault." if not kwargs else None

    def compare(self, guess: int) -> str:
        """Compare a guess with the number.

        Args:
            guess: The guess.
        """
        self.tries += 1
        return "low" if guess < self.number else "high" if guess > self.number else "right"

    def get_reward(self):
        return self.tries / 10

    def _hidden(self):
        return self.number


class Added(Vault):
    def reset(self, **kwargs):
        return "Open it."


def rollout(prompts, trainer):
    return {}
'''


def called(guess):
    return f'<tool_call>{{"name": "compare", "arguments": {{"guess": {guess}}}}}</tool_call>'


@pytest.fixture
def vault(tmp_path):
    (tmp_path / "vault.py").write_text(CODE)
    return f"trl:{tmp_path}/vault.py:Vault"


def test_methods_are_tools_and_get_reward_scores_the_episode(table, vault):
    row = {"prompt": [{"role": "user", "content": "?"}], "number": 500}
    first, second, last = table(vault).play(row, called(1), called(500), "It is 500.")
    assert [(each["name"], each["content"]) for each in first[0]] == [("compare", "low")]
    assert second[0][0]["content"] == "right"
    assert (first[1:], second[1:], last) == ((0.0, False), (0.0, False), ("", 0.2, True))
    (answer, *_), *_ = table(vault).play(row, called('"one"'))
    assert answer[0]["content"].startswith("error: ")


def test_rows_have_what_reset_returns_and_the_tools(table, vault, rows):
    made = rows(vault, 2)
    assert [row["prompt"] for row in made] == [[{"role": "user", "content": "Open the vault."}]] * 2
    assert [tool["function"]["name"] for tool in made[0]["tools"]] == ["compare"]
    guesses = [called(n) for n in (250, 500, 750)]
    episodes = [
        [each[0][0]["content"] for each in table(vault).play(row, *guesses)] for row in (*made, made[0])
    ]
    assert episodes[0] == episodes[2] != episodes[1], "the number is drawn from the row's start"


def test_what_reset_adds_must_stand_in_the_prompt_and_a_rollout_func_is_an_agent(table, vault):
    with pytest.raises(RewardError, match=r"with which the row's prompt does not end"):
        table(vault.replace("Vault", "Added")).play({"prompt": "?"}, "!")
    with pytest.raises(
        RewardError, match=r"is a rollout_func, .* write agent: \{command: trl:.*/vault\.py:rollout\}\."
    ):
        table(vault.replace("Vault", "rollout")).play({"prompt": "?"}, "!")


def test_a_format_that_there_is_not_is_one_sentence(table, vault):
    with pytest.raises(RewardError, match=r"tool_format='json' is none of xml, glm, "):
        table(vault, tool_format="json").play({"prompt": "?"}, "!")


@pytest.mark.slow
def test_trl_tells_tools_from_other_methods_by_the_same_names(installed):
    """As of the version that this is written for, in the source of its trainer."""
    installed("trl")
    script = (
        "import inspect, json\n"
        "from trl.trainer import grpo_trainer as trl\n"
        "source = inspect.getsource(trl.GRPOTrainer.__init__)\n"
        "print(json.dumps([str(inspect.signature(trl._SupportsReset.reset)), source]))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=200, check=True
    )
    signature, source = json.loads(ran.stdout.splitlines()[-1])
    assert signature == "(self, **kwargs) -> str | None"
    for line in ('member_name == "reset"', 'member_name == "get_reward"', 'not member_name.startswith("_")'):
        assert line in source
