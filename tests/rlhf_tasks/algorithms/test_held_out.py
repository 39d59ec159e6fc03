"""The section `evaluation`: its defaults, its refusals, and rows that are also trained on."""

import json
from pathlib import Path
from typing import Any

import pytest

from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, make_config
from prefect_rlhf.rlhf_tasks.algorithms.held_out import evaluation_of, shared_prompts
from prefect_rlhf.rlhf_tasks.algorithms.ppo import PPOConfig

REWARD, OTHER = {"function": "judge:right"}, {"function": "judge:short", "weight": 2}
HERE, THERE = {"used_in": "training"}, {"used_in": "evaluation"}


def document(kind: str = "ppo", evaluation: Any = None, **changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "type": kind,
        "models": {"actor": "m"},
        "data": {"train": "rows.jsonl", "column_map": {"question": "prompt"}},
        "seed": 5,
        "total_iterations": 6,
        "evaluation": evaluation,
    }
    if kind == "ppo":
        made |= {"sampling": {"max_completion_length": 9, "temperature": 0.7}, "rewards": [REWARD]}
    return made | changes


def test_a_run_has_none_by_default():
    assert evaluation_of(make_config(document())) is None


def test_what_it_leaves_out_is_the_runs_and_answers_are_greedy():
    found = evaluation_of(make_config(document(evaluation={"data": "held_out.jsonl"})))
    assert found is not None
    assert (found.data.train, found.data.column_map) == ("held_out.jsonl", {"question": "prompt"})
    assert [reward.name for reward in found.rewards] == ["right"]
    assert (found.sampling.max_completion_length, found.sampling.temperature) == (9, 0.0)
    assert (found.seed, found.batch_size) == (5, 64)


def test_it_may_have_rewards_and_samples_of_its_own():
    asked = {"data": "h", "num_generations": 3, "temperature": 1}
    rewards = [REWARD | HERE, OTHER | THERE]
    config = make_config(document(evaluation=asked, rewards=rewards, batch_size=32))
    assert isinstance(config, PPOConfig)
    assert [reward.name for reward in config.scoring_rewards] == ["right"]
    found = evaluation_of(config)
    assert found is not None
    assert [(reward.name, reward.weight) for reward in found.rewards] == [("short", 2)]
    assert (found.num_generations, found.batch_size, found.sampling.temperature) == (3, 30, 1)


def test_its_answers_end_as_the_runs_do():
    stops = {"stop": (3, "\n\n")}
    sampling = {"max_completion_length": 9, "min_new_tokens": 6, **stops}
    asked = {"data": "h", "max_completion_length": 4}
    found = evaluation_of(make_config(document(evaluation=asked, sampling=sampling)))
    assert found is not None
    assert found.sampling.model_dump(include={*stops, "min_new_tokens"}) == {**stops, "min_new_tokens": 4}


@pytest.mark.parametrize(("every", "due"), [(1, [0, 1, 2, 3, 4, 5]), (2, [1, 3, 5]), (4, [3, 5]), (6, [5])])
def test_every_nth_iteration_is_due_and_the_last(every, due):
    section = make_config(document(evaluation={"data": "h", "every": every})).evaluation  # type: ignore[attr-defined]
    assert [t for t in range(6) if section.is_due(t, 6)] == due


@pytest.mark.parametrize(
    ("kind", "evaluation", "more", "told"),
    [
        ("ppo", {"data": "h", "every": 7}, {}, "evaluation.every=7 is more than total_iterations=6"),
        ("ppo", {"data": "h", "every": 0}, {}, "evaluation.every"),
        ("ppo", {}, {}, "evaluation.data"),
        ("sft", {"data": "h", "max_completion_length": 4}, {}, "nothing scores the answers"),
        ("sft", {"data": "h"}, {"rewards": [REWARD]}, "Give evaluation.max_completion_length"),
        (
            "sft",
            None,
            {"rewards": [REWARD]},
            "rewards.0: a run of type 'sft' uses rewards in its evaluation only.",
        ),
        (
            "sft",
            {"data": "h", "loss": True},
            {"rewards": [REWARD | HERE]},
            "Add a section evaluation and used_in: evaluation, or leave out 'right'.",
        ),
        (
            "ppo",
            None,
            {"rewards": [REWARD, OTHER | THERE]},
            "rewards.1.used_in=evaluation: the run has no section evaluation. Add one, or leave out 'short'.",
        ),
        ("ppo", {"data": "h"}, {"rewards": [REWARD | HERE]}, "nothing scores the answers"),
        (
            "reward_model",
            {"data": "h", "max_completion_length": 4},
            {"rewards": [REWARD]},
            "a run of type 'reward_model' trains none. Leave it out.",
        ),
        (
            "ppo",
            {"data": "h"},
            {"rewards": [REWARD, OTHER | THERE, OTHER | THERE]},
            "two rewards share a name",
        ),
        (
            "grpo",
            {"data": "h"},
            {
                "rewards": [REWARD | HERE, OTHER | THERE],
                "environment": {"factory": "m:short"},
                "sampling": {"max_completion_length": 9},
            },
            "two rewards share a name: short, short. Rename one of the functions.",
        ),
        (
            "ppo",
            {"data": "h", "every": 3, "keep_best": 1},
            {"snapshot_every": 2},
            "every=3 is no multiple of snapshot_every=2",
        ),
        ("evaluate", None, {"rewards": []}, "nothing scores the answers"),
        (
            "evaluate",
            None,
            {"rewards": [REWARD, OTHER | THERE]},
            "rewards: a run of type 'evaluate' uses all of them. Leave used_in out.",
        ),
    ],
)
def test_a_faulty_one_is_refused_in_one_sentence(kind, evaluation, more, told):
    faulty = document(kind, evaluation, **more)
    if kind == "evaluate":
        del faulty["evaluation"], faulty["total_iterations"]
        faulty["sampling"] = {"max_completion_length": 4}
    with pytest.raises(ConfigError) as refused:
        make_config(faulty)
    assert told in str(refused.value)
    assert str(refused.value).count("\n") == 0


def rows(path: Path, *found: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return str(path)


def test_rows_that_are_also_trained_on_are_named(tmp_path):
    trained = rows(tmp_path / "rows.jsonl", {"prompt": "a"}, {"prompt": "b"}, {"prompt": "b"})
    held_out = rows(tmp_path / "h.jsonl", {"prompt": "c"}, {"prompt": "b"}, {"prompt": "d"})
    config = make_config(document(evaluation={"data": held_out}, data={"train": trained}))
    told = shared_prompts(config)
    assert told is not None
    assert f"1 of 3 held-out prompts are also in {trained} (the first: {held_out}:2)" in told
    rows(tmp_path / "rows.jsonl", {"prompt": "a"}, {"prompt": "B"})
    assert shared_prompts(config) is None


def test_prompts_of_conversations_are_compared_without_the_answer(tmp_path):
    asked = {"role": "user", "content": "hello"}
    trained = rows(tmp_path / "rows.jsonl", {"messages": [asked, {"role": "assistant", "content": "x"}]})
    held_out = rows(tmp_path / "h.jsonl", {"prompt": [asked]})
    config = make_config(document(evaluation={"data": held_out}, data={"train": trained}))
    assert "1 of 1" in (shared_prompts(config) or "")
