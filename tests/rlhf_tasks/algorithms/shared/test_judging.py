"""The judge's call: which questions it is asked, what it gives, and where it stands in the graphs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, make_config
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm
from prefect_rlhf.rlhf_tasks.algorithms.shared import judging
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError
from prefect_rlhf.rlhf_tasks.user_code.rewards import read_samples
from tests.rlhf_tasks.algorithms.one_rank import OneRank, world_of_one
from tests.tiny_judge import judged
from tests.tiny_runs import EOS, byte_tokenizer

N_SEQS = 16
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<A>"


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with world_of_one():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Iterator[Any]:
    runs: list[OneRank] = []

    def make(**changes: Any) -> OneRank:
        runs.append(OneRank(judged(folder, beta=0.0, dtype="float32", **changes), tmp_path))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that the judge has read."""
    seen: list[str] = []
    tokenizer = byte_tokenizer()
    real = judging.generate

    def reading(engine: Any, batch: Any, *others: Any, **named: Any) -> Any:
        prompts = [ids.tolist() for ids in batch["prompt_ids"].split()]
        seen.extend(tokenizer.decode(ids, skip_special_tokens=False) for ids in prompts)
        return real(engine, batch, *others, **named)

    monkeypatch.setattr(judging, "generate", reading)
    return seen


def replies(store: Any) -> list[Any]:
    return [json.loads(each) for each in store.get(range(N_SEQS), ["judge_replies"])["judge_replies"].texts()]


def test_the_judge_reads_prompt_response_and_columns_and_its_score_is_a_reward(start, asked, tmp_path):
    run = start()
    metrics, store = run.iterate(0)
    samples = list(read_samples(tmp_path, N_SEQS))
    assert asked[0] == "{prompt}|{completion}|{answer}:".format(**samples[0] | samples[0]["columns"])
    for sample, (reply,) in zip(samples, replies(store), strict=False):
        digits = [letter for letter in reply if letter.isdigit()]
        assert sample["score"] == (int(digits[-1]) / 9 if digits else 0.0)
        assert sample["columns"]["judge_replies"] == [reply]
    unread = sum(not any(map(str.isdigit, reply)) for (reply,) in replies(store))
    assert metrics["judge/unreadable"] == unread / N_SEQS
    assert 0 < metrics["judge/completions/mean_length"] <= 2
    assert metrics["rewards/judge/mean"] == pytest.approx(metrics["reward"])


def test_the_judge_has_its_own_chat_template_and_a_response_cannot_write_its_end(start, asked, folder):
    file = folder / "judge" / "chat_template.jinja"
    file.write_text(TEMPLATE)
    judging._tokenizer.cache_clear()
    try:
        start(asks={"template": f"{EOS}{{completion}}"}).iterate(0)
    finally:
        file.unlink()
        judging._tokenizer.cache_clear()
    assert all(text.startswith("<user>< eos>") and text.endswith("<A>") for text in asked)
    assert not any(byte_tokenizer().token_to_id(EOS) in byte_tokenizer().encode(text).ids for text in asked)


def test_an_answer_is_compared_in_both_orders(start, asked):
    """The judge says digits, so no reply has a verdict; verdicts are read in tests of the reward."""
    with pytest.raises(RewardError, match="no reply"):
        start(asks={"template": "{first}|{second}", "against": "answer"}).iterate(0)
    pairs = [
        (*text.rpartition("|")[::2], *other.partition("|")[::2])
        for text, other in zip(asked[::2], asked[1::2], strict=True)
    ]
    assert len(pairs) == N_SEQS
    assert all(
        (first, second) == (other_second, other_first) for first, second, other_first, other_second in pairs
    )
    assert all(second.isdigit() for _, second, *_ in pairs), "the rows' answers"


def test_rows_that_the_reward_leaves_to_others_are_not_asked_about(start, asked):
    length = {"function": "builtin:length", "kwargs": {"most": 3}}
    run = start(only={"answer": ["0", "1"]})
    run.close()
    (judge,) = run.config.rewards
    run = start(rewards=[judge.model_dump(), length])
    _, store = run.iterate(0)
    answers = [json.loads(row)["answer"] for row in store.get(range(N_SEQS), ["columns"])["columns"].texts()]
    assert [len(each) for each in replies(store)] == [int(answer in "01") for answer in answers]
    assert len(asked) == sum(answer in "01" for answer in answers)


def test_a_question_that_is_too_long_is_not_asked_and_costs_its_sample(start, asked, tmp_path):
    template = "{prompt}" + "." * 114
    _, store = start(asks={"template": template}, on_reward_error="skip").iterate(0)
    lost = [each == [None] for each in replies(store)]
    assert 0 < sum(lost) < N_SEQS
    assert all(len(text) + 2 <= 128 for text in asked)
    assert [sample["score"] is None for sample in read_samples(tmp_path, N_SEQS)] == lost[:8]
    skipped = "".join(path.read_text() for path in tmp_path.glob("skipped-samples/*"))
    assert "the question is longer than the context of models.judge" in skipped


def test_a_reply_without_a_score_ends_the_run_unless_it_has_one_in_the_configuration(start):
    with pytest.raises(RewardError, match="the reply has no score; it ends with"):
        start(asks={"unreadable": None}).iterate(0)


def test_a_pattern_that_no_reply_has_ends_the_run_at_once_whatever_unreadable_is(start):
    run = start(asks={"pattern": "Score: ([0-9])"})
    with pytest.raises(
        RewardError, match=r"no reply of models\.judge in iteration 0 has a score; one ends with"
    ):
        run.iterate(0)
    metrics, _ = run.iterate(1)
    assert metrics["judge/unreadable"] == 1, "later such a batch may be chance"


@pytest.mark.parametrize(
    "kind",
    ["grpo", "dapo", "rloo", "reinforce_pp", "remax", "ppo", "expert_iteration", "evaluate", "rollout"],
)
def test_every_algorithm_that_scores_asks_the_judge_before(kind):
    record = algorithm(kind)
    calls = {call.name: call for call in record.calls(record.nominal())}
    for prefix in ("", "greedy_") if kind == "remax" else ("",):
        judge, score = calls[f"{prefix}judge_generate"], calls[f"{prefix}reward_inference"]
        assert (judge.role, judge.kind) == ("judge", "generate")
        assert judge.inputs == (f"{prefix}input_ids", f"{prefix}response_mask", "columns")
        assert set(judge.outputs) < set(score.inputs)


def test_an_evaluation_of_a_model_asks_the_judge(folder, tmp_path):
    scored = judged(folder).model_dump(mode="json", exclude_none=True)
    kept = {key: scored[key] for key in ("models", "data", "rewards", "batch_size", "sampling")}
    run = OneRank(make_config({**kept, "type": "evaluate", "dtype": "float32"}), tmp_path)
    try:
        metrics, _ = run.iterate(0)
    finally:
        run.close()
    assert metrics["rewards/judge/mean"] == pytest.approx(metrics["reward"])
    assert metrics["judge/unreadable"] < 1


def test_after_tools_and_environments_the_judge_reads_what_rewards_do(folder):
    tools = {"tools": [{"function": "builtin:python"}]}
    for changes, counts in ((tools, ("tool_calls",)), ({"environment": {"factory": "a.py:Game"}}, ())):
        calls = {call.name: call for call in algorithm("grpo").calls(judged(folder, **changes))}
        assert calls["judge_generate"].inputs == ("input_ids", "response_mask", "columns", *counts)


def test_only_the_policy_draws_ahead_and_in_segments(folder):
    for changes in ({"staleness": 2}, {"sampling": {"max_completion_length": 8, "segment_tokens": 4}}):
        config = judged(folder, **changes)
        calls = {call.name: call for call in algorithm("grpo").calls(config)}
        judge = calls["judge_generate"]
        assert (judge.lead, judge.segment_tokens) == (0, None)
        assert calls["actor_generate"].lead == changes.get("staleness", 0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"rewards": [{"function": "builtin:judge"}], "models": None},
            "names neither kwargs.url, a service, nor",
        ),
        (
            {"rewards": [{"function": "builtin:length", "kwargs": {"most": 3}}]},
            "models.judge: no reward asks it",
        ),
        (
            {"evaluation": {"data": "rows.jsonl"}, "on_reward_error": "skip"},
            "rewards.0: without url, builtin:judge asks models.judge, which replies in training only",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_sentence(folder, changes, sentence):
    document = judged(folder, beta=0.0).model_dump(mode="json")
    if "models" in changes:
        changes = {**changes, "models": {"actor": document["models"]["actor"]}}
    with pytest.raises(ConfigError, match=sentence):
        make_config({**document, **changes})
