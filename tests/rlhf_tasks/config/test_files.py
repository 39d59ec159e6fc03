"""A key that a configuration does not know, or lacks: what to write instead."""

from typing import Any

import pytest
import yaml

from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, apply_override, make_config
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm, algorithm_names
from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from prefect_rlhf.rlhf_tasks.config.files import ELSEWHERE
from prefect_rlhf.rlhf_tasks.config.sampling import Scores

WHOLE: dict[str, Any] = {
    "models": {"actor": "a"},
    "data": {"train": "d"},
    "total_iterations": 3,
    "sampling": {"max_completion_length": 3},
    "rewards": [{"function": "m:f"}],
}


def said_of(document: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        make_config(document)
    return str(refused.value).split("\n")


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("grpo", {"learning_rate": 1}, "learning_rate: unknown key: here it is optimizer.learning_rate."),
        (
            "grpo",
            {"max_prompt_length": 1},
            "max_prompt_length: unknown key: here it is data.max_prompt_tokens.",
        ),
        ("grpo", {"lora": {"r": 8}}, "lora.r: unknown key: here it is lora.rank."),
        ("grpo", {"lora": {"lora_alpha": 8}}, "lora.lora_alpha: unknown key: here it is lora.alpha."),
        ("grpo", {"temperature": 1}, "temperature: unknown key: here it is sampling.temperature."),
        ("grpo", {"cliprange": 0.1}, "cliprange: unknown key: here it is epsilon."),
        ("ppo", {"epsilon": 0.1}, "epsilon: unknown key: here it is cliprange."),
        ("ppo", {"kl_loss_coef": 0.1}, "kl_loss_coef: unknown key: here it is kl_coef."),
        ("grpo", {"reward_weights": [1]}, "reward_weights: unknown key: here it is rewards.0.weight."),
        ("ppo", {"critic_optimizer": {}}, "critic_optimizer: unknown key: here it is critic_learning_rate."),
        (
            "grpo",
            {"data": {"train": "openai/gsm8k", "subset": "main"}},
            "data.subset: unknown key: write subset and split behind the data set's name, as in data.train: "
            "openai/gsm8k:main:train.",
        ),
        (
            "ppo",
            {"snapshot_max_s": 600},
            "snapshot_max_s: unknown key: write the seconds as snapshot_every, e.g. snapshot_every: 600s.",
        ),
        (
            "ppo",
            {"startup_timeout_s": 600},
            "startup_timeout_s: unknown key: patience is a factor of this and other waits, e.g. "
            "2 for twice as long.",
        ),
        (
            "ppo",
            {"runtime": {"patience": 2}},
            "runtime: unknown key: patience and max_restarts are keys of the configuration itself, e.g. patience: 2.",
        ),
        (
            "grpo",
            {"filter_groups": True, "max_rounds": 2},
            "max_rounds: unknown key: write the rounds as filter_groups, e.g. filter_groups: 2.",
        ),
        (
            "ppo",
            {"plan": "auto", "replan": "auto"},
            "replan: unknown key: plan: adaptive is what plan: auto with replan: auto was.",
        ),
        (
            "ppo",
            {"evaluation": {"data": "d", "batch_size": 8}},
            "evaluation.batch_size: unknown key: an evaluation answers at most 64 rows at once.",
        ),
        ("grpo", {"learning_rte": 1}, "learning_rte: unknown key, did you mean 'optimizer.learning_rate'?"),
        ("grpo", {"batchsize": 1}, "batchsize: unknown key, did you mean 'batch_size'?"),
        ("grpo", {"zzz": 1}, "zzz: unknown key (known here: see prefect-rlhf config schema NAME)."),
        ("grpo", {"lora": {"zzz": 1}}, "lora.zzz: unknown key (known here: rank, alpha, targets, export)."),
    ],
)
def test_another_librarys_name_is_answered_with_ours(kind: str, change: dict[str, Any], said: str):
    assert said_of({"type": kind, **WHOLE, **change}) == [said]


def test_all_faults_of_a_file_are_told_at_once_each_in_a_line():
    assert said_of({"type": "grpo", **WHOLE, "bf16": True, "batch_size": "many", "models": {}}) == [
        "batch_size: input should be a valid integer, unable to parse string as an integer, found 'many'.",
        "models.actor: required, but not given. Write, for example, `models: {actor: models/my-model}`.",
        "bf16: unknown key: here it is dtype.",
    ]


def test_many_faults_are_counted():
    lines = said_of({"type": "grpo", **WHOLE, **{f"unknown_{number}": 1 for number in range(40)}})
    assert len(lines) == 13
    assert lines[-1] == "There are 28 more."


@pytest.mark.parametrize("kind", algorithm_names())
def test_what_the_sentences_say_to_write_makes_the_file_complete(kind: str):
    document: dict[str, Any] = {"type": kind}
    if issubclass(algorithm(kind).config, Scores):
        document["rewards"] = WHOLE["rewards"]
    if kind == "expert_iteration":
        document["best_of_group"] = True
    for line in said_of(document):
        assert "required, but not given. Write, for example, `" in line
        document |= yaml.safe_load(line.split("`")[1])
    assert make_config(document).type == kind


@pytest.mark.parametrize(("theirs", "ours"), ELSEWHERE.items())
def test_every_name_of_ours_that_is_suggested_is_one(theirs: str, ours: tuple[str, ...]):
    def has(config: type[RunConfig], dotted: str) -> bool:
        document: dict[str, Any] = {"type": config.model_fields["type"].default, **WHOLE}
        document = {key: value for key, value in document.items() if key in config.model_fields}
        apply_override(document, f"{dotted}=null")
        try:
            make_config(document)
        except ConfigError as refused:
            return f"{dotted}: unknown key" not in str(refused)
        return True

    configs = [algorithm(name).config for name in algorithm_names()]
    for dotted in ours:
        assert any(dotted.partition(".")[0] in c.model_fields and has(c, dotted) for c in configs), (
            theirs,
            dotted,
        )
