"""A language model as a judge, behind a real HTTP server that answers as a chat API does."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.config.responses import RewardConfig
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError
from prefect_rlhf.rlhf_tasks.user_code.rewards import Judged, RewardProcess
from tests.judged import SUMS, VERL
from tests.loopback import Service, served

Says = Callable[[str, int], str]  # (what is asked, number of the request) -> the reply


@pytest.fixture(scope="module")
def server() -> Iterator[Service]:
    with served(Service(len)) as service:
        yield service


@pytest.fixture
def chat(server: Service) -> Service:
    server.asked.clear()
    return server


def replies(chat: Service, says: Says) -> None:
    """Let a chat API say something."""

    def answer(body: dict[str, Any]) -> Any:
        content = says(body["messages"][0]["content"], len(chat.asked))
        usage = {"prompt_tokens": 10, "completion_tokens": 2}
        return {"choices": [{"message": {"content": content}}], "usage": usage}

    chat.says = answer


def config_of(rewards: Any, **settings: Any) -> Any:
    return make_config(
        {
            "type": "ppo",
            "models": {"actor": "a"},
            "data": {"train": "d"},
            "sampling": {"max_completion_length": 4},
            "total_iterations": 1,
            "rewards": rewards,
            **settings,
        }
    )


def judged(chat: Service, says: Says, answers: Any = SUMS, *, skip: bool = False, **kwargs: Any) -> Judged:
    """The verdict of the built-in judge on answers."""
    replies(chat, says)
    every = {"url": f"{chat.url}/v1", "model": "grader", "allow_private": True, **kwargs}
    reward = {"function": "builtin:judge", "kwargs": every}
    process = RewardProcess(config_of([reward], on_reward_error="skip" if skip else "stop"))
    try:
        return process.submit(answers).result(timeout=110)
    finally:
        process.close()


def test_each_answer_is_graded_alone_and_the_cost_is_logged(chat: Service, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_KEY", "canary")

    def says(question: str, number: int) -> str:
        return "Score: 3\nno, Score: 10" if "no" not in question else "Score: 2.5"

    verdict = judged(
        chat, says, api_key={"env": "JUDGE_KEY"}, template='{task} {prompt}: {completion} {"a": {}}'
    )
    assert verdict.values == {"judge": [1.0, 0.25, 1.0]}
    assert {a["messages"][0]["content"] for a in chat.asked} >= {'add What is 3 + 4?: 7 {"a": {}}'}
    assert {(a["path"], a["login"], a["model"]) for a in chat.asked} == {
        ("/v1/chat/completions", "Bearer canary", "grader")
    }
    cost = {"judge/requests": 3, "judge/prompt_tokens": 30, "judge/completion_tokens": 6}
    assert verdict.logged == {"judge": cost}


def test_a_rubric_weighs_the_criteria_that_are_met(chat: Service):
    rubric = {"is short": 3.0, "is right": 1.0, "swears": -2.0}
    verdict = judged(chat, lambda q, n: 'Well {"1": true, "2": false, "3": true}', rubric=rubric)
    assert verdict.values == {"judge": [pytest.approx((3 - 2) / 4)] * 3}
    assert "2. is right" in chat.asked[0]["messages"][0]["content"]


def test_a_comparison_asks_both_orders_so_that_a_judge_that_prefers_a_place_says_nothing(chat: Service):
    verdict = judged(chat, lambda q, n: "[[A]]", against="ground_truth")
    assert verdict.values == {"judge": [0.5] * 3}
    assert len(chat.asked) == 6

    def better(question: str, number: int) -> str:
        first = re.search(r"Answer A:\n(.*)", question)
        return "[[A]]" if first and first[1] == "it is 1" else "[[B]]" if "it is 1" in question else "[[C]]"

    assert judged(chat, better, against="ground_truth").values == {"judge": [0.5, 0.5, 1.0]}


def test_a_schema_is_sent_and_its_score_read(chat: Service):
    schema = {"type": "object", "properties": {"score": {"type": "number"}}}
    verdict = judged(chat, lambda q, n: '{"why": {"a": 1}, "score": 4}', schema=schema, most=5.0)
    assert verdict.values == {"judge": [0.8] * 3}
    assert chat.asked[0]["response_format"]["json_schema"]["schema"] == schema


def test_a_reply_without_a_score_is_asked_for_again_and_then_costs_its_sample(chat: Service):
    def says(question: str, number: int) -> str:
        return "I would rather not: 11 of 10, Score: 11" if "10 + 5" in question else "Score: 5"

    verdict = judged(chat, says, skip=True)
    assert list(verdict.faults) == [1]
    assert "2 replies have no score; the last ends with" in verdict.faults[1].reason
    with pytest.raises(RewardError, match="2 replies have no score"):
        judged(chat, says)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"schema": {}, "against": "answer"}, "give one of schema, rubric and against"),
        ({"rubric": {"swears": -1.0}}, "no criterion of its rubric has a weight above 0"),
        ({"pattern": "("}, "pattern '\\('|pattern \\( is none"),
        ({"tries": 0}, "tries=0 must be above 0"),
        ({"most": "10"}, "most='10' is not a number"),
        ({"most": math.inf}, "most=inf is not a number"),
        ({"tries": True}, "tries=True is not a whole number"),
        ({"rubric": ["short"]}, "is not a mapping of criteria"),
        ({"rubric": {"short": "much"}}, "a weight is no number"),
        ({"rubric": {"short": 1.0}, "template": "{completion}"}, "template lacks {criteria}"),
        ({"against": "task", "template": "{completion} {task}"}, "template lacks {first}"),
        ({"url": "api.example.org/v1"}, "url is not of the form"),
        ({"url": "http://user:hunter2@localhost/v1"}, "url is not of the form"),
        ({"url": "http://localhost/v1?api=3"}, "url is not of the form"),
        ({"template": "{nothing}"}, "its template names {nothing}, but there is only"),
        ({"allow_private": False}, "in a private network"),
    ],
)
def test_what_cannot_be_used_is_said_in_a_sentence(chat: Service, wrong: dict[str, Any], sentence: str):
    with pytest.raises(RewardError, match=sentence):
        judged(chat, lambda q, n: "Score: 1", **wrong)


def replied(*replies: list[str | None], skip: bool = False, **kwargs: Any) -> Judged:
    """The verdict on SUMS, of which a role of the run has said this."""
    answers = replace(SUMS, columns={**SUMS.columns, "judge_replies": list(replies)})
    document = config_of([{"function": "builtin:length", "kwargs": {"most": 1}}])
    reward = RewardConfig(function="builtin:judge", kwargs=kwargs)
    config = document.model_copy(update={"rewards": (reward,), "on_reward_error": "skip" if skip else "stop"})
    process = RewardProcess(config)
    try:
        return process.submit(answers).result(timeout=110)
    finally:
        process.close()


def test_without_a_url_the_replies_of_the_runs_own_judge_are_read():
    assert replied(["Score: 3"], ["no, Score: 10"], ["Score: 0"]).values == {"judge": [0.3, 1.0, 0.0]}
    both = replied(["[[A]]", "[[B]]"], ["[[B]]", "[[A]]"], ["[[A]]", "[[A]]"], against="ground_truth")
    assert both.values == {"judge": [1.0, 0.0, 0.5]}


def test_a_reply_that_cannot_be_read_scores_as_configured_and_is_counted_or_costs_its_sample():
    said = (["Score: 3"], ["hm"], ["Score: 11"])
    verdict = replied(*said, unreadable=0.25)
    assert verdict.values == {"judge": [0.3, 0.25, 0.25]}
    assert verdict.logged == {"judge": {"judge/unreadable": 2}}
    verdict = replied(*said, skip=True)
    assert {place: fault.reason for place, fault in verdict.faults.items()} == {
        1: "reward builtin:judge: the reply has no score; it ends with 'hm'.",
        2: "reward builtin:judge: the reply has no score; it ends with 'Score: 11'.",
    }
    with pytest.raises(RewardError, match=r"longer than the context of models\.judge") as refused:
        replied(["Score: 3"], [None], ["Score: 3"], unreadable=0.25)
    assert refused.value.place == 1


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"model": "big"}, "only a service has model, and without url the run's role judge is asked"),
        ({"tries": 3}, "only a service has tries"),
        ({"max_tokens": 0}, "max_tokens=0 must be above 0"),
        ({"temperature": -1}, "temperature=-1 is below 0"),
        ({"unreadable": "0"}, "unreadable='0' is not a number"),
    ],
)
def test_what_the_runs_own_judge_cannot_use_is_said_in_a_sentence(wrong: dict[str, Any], sentence: str):
    with pytest.raises(RewardError, match=sentence):
        replied(["Score: 3"], ["Score: 3"], ["Score: 3"], **wrong)


@pytest.mark.parametrize(
    "reply",
    [
        '{"score": 1e999}',
        '{"score": 1' + "0" * 400 + "}",
        '{"score": true}',
        '{"score": "much"}',
        "{}",
        "[1]",
    ],
)
def test_a_score_that_is_none_is_asked_for_again(chat: Service, reply: str):
    schema = {"type": "object"}
    verdict = judged(
        chat, lambda q, n: reply if n <= 3 else '{"score": 5} {"why": 1}', schema=schema, tries=4
    )
    assert verdict.values == {"judge": [0.5] * 3}


def test_the_cost_of_a_batch_is_its_own(chat: Service):
    replies(chat, lambda question, number: "**Score:** 5")
    every = {"url": f"{chat.url}/v1", "model": "grader", "allow_private": True}
    process = RewardProcess(config_of([{"function": "builtin:judge", "kwargs": every}]))
    try:
        both = [process.submit(SUMS).result(timeout=110).logged["judge"]["judge/requests"] for _ in range(2)]
    finally:
        process.close()
    assert both == [3, 3]


def test_a_column_named_criteria_stands_in_a_template(chat: Service):
    columns = {**SUMS.columns, "criteria": ["be short"] * 3}
    judged(chat, lambda q, n: "Score: 1", replace(SUMS, columns=columns), template="{criteria}: {completion}")
    assert chat.asked[0]["messages"][0]["content"].startswith("be short: ")


def routes(column: str = "data_source", **more: Any) -> dict[str, Any]:
    shared = {"function": "builtin:length", "kwargs": {"most": 3}}
    exact = {"function": "builtin:exact_match", "weight": 2.0}
    return {"by": column, "second/sums": [exact, shared], "other": [shared], **more}


def test_rewards_are_routed_by_a_column_and_one_under_two_values_is_one_reward():
    exact, length = config_of(routes()).rewards
    assert exact.only == {"data_source": ("second/sums",)}
    assert length.only == {"data_source": ("second/sums", "other")}


def test_a_reward_judges_only_the_rows_that_are_routed_to_it():
    add = {"function": "builtin:exact_match", "kwargs": {"column": "ground_truth"}}
    process = RewardProcess(
        config_of(
            {"by": "task", "add": [add], "subtract": ["builtin:format"]}
            | {"subtract": [{"function": "builtin:format", "kwargs": {"pattern": "it is .*"}}]}
        )
    )
    try:
        assert process.submit(SUMS).result(timeout=110).values == {
            "exact_match": [1.0, 0.0, None],
            "format": [None, None, 1.0],
        }
        with pytest.raises(RewardError, match="no reward judges rows with task=None"):
            process.submit(VERL).result(timeout=110)
    finally:
        process.close()


def test_beside_a_reward_model_rows_need_no_reward():
    add = {"function": "builtin:exact_match", "kwargs": {"column": "ground_truth"}, "only": {"task": ["add"]}}
    process = RewardProcess(config_of([add], models={"actor": "a", "reward": "r"}))
    try:
        assert process.submit(SUMS).result(timeout=110).values == {"exact_match": [1.0, 0.0, None]}
    finally:
        process.close()


@pytest.mark.parametrize(
    ("rewards", "sentence"),
    [
        ({"gsm8k": []}, "or by: COLUMN and a list for each of its values"),
        ({"by": "task"}, "or by: COLUMN and a list for each of its values"),
        ({"by": "task", "add": []}, "add: give a list of rewards"),
        ({"by": "task", "add": ["builtin:length"]}, "add: a reward is a mapping such as"),
        (
            {"by": "task", "add": [{"function": "builtin:length", "only": {"a": ["b"]}}]},
            "has no `only` of its own",
        ),
    ],
)
def test_routes_that_name_nothing_are_refused(rewards: Any, sentence: str):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        config_of(rewards)
