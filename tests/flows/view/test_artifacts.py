"""What a run tells the server beside its graph; how pages look is tested in test_browser.py."""

import asyncio

import pytest
from prefect import flow, tags
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

from prefect_rlhf.flows.run.progress import run_tags
from prefect_rlhf.flows.view.artifacts import (
    Link,
    completions_page,
    curves_page,
    markdown_table,
    progress_bar,
    score_rows,
    tag_flow_run,
)
from prefect_rlhf.flows.view.words import measured_against
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from tests.tiny_runs import ppo_config


@pytest.mark.cluster
def test_tags_join_those_that_the_flow_run_has(prefect):
    @flow
    async def tagged() -> list[str]:
        await tag_flow_run(["algo:ppo", "own"])
        await tag_flow_run(["algo:ppo", "plan:auto"])
        async with get_client() as client:
            return sorted((await client.read_flow_run(flow_run.id)).tags)

    with tags("own"):
        assert asyncio.run(tagged()) == ["algo:ppo", "own", "plan:auto"]


def test_tags_name_algorithm_model_and_plan(tmp_path):
    assert run_tags(ppo_config(tmp_path)) == ["algo:ppo", "model:actor", "plan:heuristic"]
    by_hand = ppo_config(tmp_path, plan={"actor_train": "0"})
    assert run_tags(by_hand)[2] == "plan:manual"
    assert run_tags(ppo_config(tmp_path, plan="auto"))[2] == "plan:auto"
    after = {"type": "reward_model", "models": {"actor": "runs/sft-1/model"}, "data": {"train": "d"}}
    assert run_tags(make_config({**after, "total_iterations": 1})) == [
        "algo:reward-model",
        "model:sft-1",
        "plan:heuristic",
    ]


def test_scores_of_a_sample_are_flat_and_a_column_that_nobody_fills_is_left_out():
    sample = {
        "prompt": "p",
        "completion": "c",
        "score": 1.25,
        "rewards": {"mine": 1.0, "length": None},
        "reward_model": None,
        "truncated": True,
    }
    judged_too = {**sample, "rewards": {"mine": 0.0, "length": 0.25}}
    assert score_rows([sample, judged_too]) == [
        {"sample": 1, "score": 1.25, "mine": 1.0, "length": None, "truncated": True},
        {"sample": 2, "score": 1.25, "mine": 0.0, "length": 0.25, "truncated": True},
    ]


def test_a_table_has_numbers_that_can_be_read_and_text_that_is_only_text():
    rows = [
        {"what": "![x](http://a.b/c) <b>|`", "s": 0.9563824534416199, "yes": True, "none": None},
        {"what": "two\nlines\x00", "s": 12, "yes": False, "none": None},
    ]
    assert markdown_table(rows).splitlines() == [
        "| what | s | yes | none |",
        "| --- | --: | --: | --: |",
        r"| \!\[x\]\(http\:\/\/a\.b\/c\) \<b\>\|\` | 0.9564 | yes |  |",
        "| two ↵ lines\ufffd | 12 |  |  |",
    ]


def test_a_completion_stands_beside_the_right_answer_of_its_row():
    sample = {"prompt": "3+4=", "completion": "8", "score": 0.0, "rewards": {"exact": 0.0}}
    page = completions_page(
        [{**sample, "columns": {"answer": 7, "level": "easy"}}, {**sample, "columns": {}}]
    )
    assert "| completion | right answer |\n| --- | --- |\n| 8 | 7 |" in page.markdown
    assert page.markdown.count("right answer") == 1
    assert "level" not in page.markdown.partition("### Sample 1")[0], "the table has scores alone"
    assert completions_page([]) is None


def test_one_iteration_makes_a_table_and_no_picture():
    row = {"iteration": 0, "reward": 0.44123, "kl": None}
    assert "| reward | 0.4412 |" in curves_page([row]).markdown
    assert "data:image" not in curves_page([row]).markdown
    assert "data:image" in curves_page([row, {**row, "iteration": 1}]).markdown
    assert curves_page([{"iteration": 0}]) is None


def test_a_link_leads_to_its_page():
    assert markdown_table([{"stage": Link("a-b|c", "/runs/flow-run/1")}]).splitlines()[-1] == (
        r"| [a-b\|c](/runs/flow-run/1) |"
    )


def test_a_word_that_no_line_holds_may_be_broken():
    [*_, line] = markdown_table([{"what": "x" * 60}]).splitlines()
    assert max(map(len, line.split("\u200b"))) < 30
    assert line.count("x") == 60


@pytest.mark.parametrize(
    ("planned", "measured", "told"),
    [
        (1.0, 13.08, "13.1 times the plan"),
        (1.0, 1.12, "12% more than planned"),
        (2.0, 1.9, "5% less than planned"),
        (2.0, 2.001, "as planned"),
        (0.0, 2.0, ""),
    ],
)
def test_a_measured_figure_says_which_way_it_is_off(planned, measured, told):
    assert measured_against(planned, measured) == told


def test_progress_has_a_bar():
    assert progress_bar(0, 0, 7) == "░" * 20 + " 0 of 7 iterations, 0 committed"
    assert progress_bar(1, 0, 2) == "█" * 10 + "░" * 10 + " 1 of 2 iterations, 0 committed"
    assert progress_bar(7, 7, 7).startswith("█" * 20 + " 7")
