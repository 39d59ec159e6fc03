import hashlib

import yaml

from flows.run.prepare import prepare
from flows.run.summary import model_card
from planner.text import plan_table
from tests.tiny_runs import ppo_config


def test_the_card_tells_where_the_weights_come_from(tmp_path):
    reward = {
        "function": "tests.tiny_reward:length_reward",
        "kwargs": {"bearer": "hunter2", "scale": 2},
    }
    prepared = prepare(ppo_config(tmp_path, rewards=[reward]))
    card = model_card(prepared, "mine", "actor", {"iteration": 2, "reward": 0.2512345, "kl": None})
    _, header, text = card.split("---\n", 2)
    assert yaml.safe_load(header) == {"library_name": "transformers", "tags": ["prefect-rlhf", "ppo"]}
    assert "# mine" in text
    assert f"started from `{tmp_path / 'actor'}`" in text
    assert "## Metrics of iteration 3\n" in text
    assert "| reward | 0.2512 |\n| kl |  |\n" in text
    assert "| iteration |" not in text
    assert prepared.rows.digest in text
    assert len(prepared.rows.digest) == len(hashlib.sha256().hexdigest())
    assert plan_table(prepared.plan) in text
    assert "- transformers 5" in text
    shown = yaml.safe_load(text.split("```yaml\n")[1].removesuffix("```\n"))
    assert "kwargs" not in shown["rewards"][0]
    assert shown["data"]["max_prompt_tokens"] == 1024
    assert "hunter2" not in card


def test_a_card_without_metrics_has_no_empty_table(tmp_path):
    card = model_card(prepare(ppo_config(tmp_path)), "mine", "actor", {})
    assert "Metrics" not in card
