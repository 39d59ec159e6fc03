"""Agents as rollouts: what is recorded are the tokens that were drawn; any plan gives the same losses from them."""

import subprocess
import sys
import time
import venv
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError
from prefect_rlhf.rlhf_tasks.algorithms.held_out import evaluation_of
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm
from prefect_rlhf.rlhf_tasks.algorithms.shared.agents import _Episodes
from prefect_rlhf.rlhf_tasks.algorithms.shared.chains import Chain
from prefect_rlhf.rlhf_tasks.data.chat_template import _environment
from prefect_rlhf.rlhf_tasks.user_code.agents.chat_api import Asked, Drawing, read_request
from prefect_rlhf.rlhf_tasks.user_code.agents.process import AgentProcess
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError
from tests.rlhf_tasks.algorithms.one_rank import runs_of_one
from tests.rlhf_tasks.parallel.generate.test_generation import tokens_of_prompts, watched
from tests.rlhf_tasks.test_environments import (
    KEYS,
    SAMPLING,
    drawn,
    folder,
    grpo_config,
    lines,
    refuse_other_gradient,
    responses,
)
from tests.rlhf_tasks.test_layout_invariance import PLANS, differences, other_plans, trajectory
from tests.rlhf_tasks.test_tools import config_of, written
from tests.rlhf_tasks.user_code.tools.templates import TEMPLATES
from tests.tiny_runs import ppo_config

__all__ = ["folder"]  # a fixture

pytestmark = pytest.mark.dist

WIDE = {"max_completion_length": 80}  # has room for all branches
FILE = Path(__file__).parents[1] / "tiny_agent.py"
FRAMEWORKS = ("openai-agents==0.24.0", "smolagents[openai]==1.26.0")


def agent(name, **settings):
    return {"environment": None, "agent": {"command": f"{sys.executable} {FILE} {name}", **settings}}


@pytest.fixture
def run(folder, tmp_path):
    """Begin a run of GRPO on this process, by an agent's name; make: the configuration"""

    def config(folder, name="", make=grpo_config, limits=(), **changes):
        return make(folder, **{**agent(name, **dict(limits)), **changes})

    with runs_of_one(config, folder, tmp_path) as begin:
        yield begin


def counts(batch):
    """(requests, refused, branches, left out) of each sample."""
    return [tuple(each.tolist()) for each in batch["agent_counts"].split()]


@other_plans(PLANS)
@pytest.mark.parametrize("name", ["echo", pytest.param("branches", marks=pytest.mark.slow)])
@pytest.mark.whole
def test_the_same_seed_gives_the_same_losses_under_any_plan(ranks, tmp_path, name, names):
    config: Any = partial(ppo_config, sampling=WIDE if name == "branches" else SAMPLING, **agent(name))
    reference = trajectory(ranks, tmp_path, *PLANS["one rank"], config)
    assert len({seen["actor_train/loss/policy"] for seen in reference}) == 3
    assert all(seen["actor_generate/agent/requests"] > 1 for seen in reference)
    assert all(seen["actor_train/policy/mismatch"] < 1e-5 for seen in reference)
    for plan in names:
        assert not differences(reference, trajectory(ranks, tmp_path, *PLANS[plan], config)), plan


def test_what_an_agent_adds_is_context_and_a_turn_is_never_tokenised_again(run):
    begun = run("echo")
    batch = drawn(begun)
    found = responses(begun, batch)
    assert {"x" * 8, "x" * 8 + "..." + "x" * 8} <= {marks for _, marks in found}
    assert [marks.count(".") // 3 + 1 for _, marks in found] == [each for each, *_ in counts(batch)]
    first = [ids[:8] for ids, marks in found if "." in marks]
    again = [begun.tokenizer.encode(begun.tokenizer.decode(ids)) for ids in first]
    assert first != again, "the model draws tokens that its texts would not have"
    assert torch.all(batch["old_logprobs"].values[~batch["response_mask"].values] == 0)
    assert set(batch["environment_rewards"].values.tolist()) > {0.5, 1.0}


@pytest.mark.parametrize("name", ["echo", "branches", "mixes"])
def test_an_engine_that_draws_one_turn_at_a_time_gives_the_same(run, monkeypatch, name):
    settings = {**WIDE, "top_k": 200}
    in_turns, beside = drawn(run(name, sampling=settings)), run(name, sampling=settings)
    monkeypatch.setattr(beside.generator, "draws_turns", False, raising=False)
    other = drawn(beside)
    assert other.data.keys() == in_turns.data.keys()
    for key, packed in in_turns.data.items():
        torch.testing.assert_close(other[key].values, packed.values)  # but for rounding
    requests = [each for each, *_ in counts(in_turns)]
    assert sum(requests) > 24


@pytest.mark.parametrize(("streamed", "whole"), [("streams", "echo"), ("stops_streams", "mixes")])
def test_a_stream_comes_while_others_are_drawn_and_gives_the_same_sample(run, monkeypatch, streamed, whole):
    expected, batch = (drawn(run(name, sampling=WIDE)) for name in (whole, streamed))
    for key in {*KEYS} - {"environment_rewards"}:
        torch.testing.assert_close(batch[key].values, expected[key].values)  # but for rounding
    if streamed == "streams":
        requests = sum(each for each, *_ in counts(batch))
        assert batch["environment_rewards"].values.sum() > 1.5 * requests, "most come in several pieces"
        beside = run(streamed, sampling=WIDE)
        monkeypatch.setattr(beside.generator, "draws_turns", False, raising=False)
        assert drawn(beside)["environment_rewards"].values.sum() == requests, "others stream what is whole"


def test_the_log_probabilities_of_a_stream_are_those_of_its_sample(run, monkeypatch):
    tell, told = AgentProcess.tell, []

    def heard(process, *args, **fields):
        told.extend(value for _, piece in fields.get("pieces", ()) for value in piece.logprobs)
        tell(process, *args, **fields)

    monkeypatch.setattr(AgentProcess, "tell", heard)
    batch = drawn(run("streams", sampling=WIDE, dtype="float32"))
    assert told
    assert set(told) <= set(batch["old_logprobs"].values.tolist())


def test_requests_with_other_stop_strings_enter_the_same_draw(run, monkeypatch):
    begun, draws = run("mixes", sampling=WIDE), []
    draw = begun.generator.draw
    monkeypatch.setattr(begun.generator, "draw", lambda *given: draws.append(given) or draw(*given))
    assert sum(requests for requests, *_ in counts(drawn(begun))) > 32
    assert len(draws) == 1


def test_a_turn_reads_only_what_is_new(run):
    """Eight letters are drawn of each turn but the last, and one of them is read with what the agent adds."""
    begun = run("echo")
    passed = watched(begun.engines["actor"], tokens_of_prompts)
    batch = drawn(begun)
    again = sum(requests - 1 for requests, *_ in counts(batch))
    assert sum(passed) <= (~batch["response_mask"].values).sum() - 16 + again


@pytest.mark.parametrize("name", ["echo", "branches"])
def test_the_gradient_is_that_of_the_drawn_tokens_alone(run, folder, name):
    refuse_other_gradient(run(name, sampling=WIDE, beta=0.0), folder)


def test_an_agent_that_asks_one_thing_after_the_other_draws_the_same_whatever_its_timing(run):
    whole = drawn(run("echo"))
    later = drawn(run("echo 0.1", limits={"at_once": 3}))
    for key in KEYS:
        torch.testing.assert_close(whole[key].values, later[key].values)  # but for rounding
    some = drawn(run("echo"), range(5, 12))
    assert responses(run("echo"), some) == responses(run("echo"), whole)[5:12]


def test_a_sample_is_all_branches_of_its_episode_and_each_token_that_was_drawn_counts_once(run):
    begun = run("branches", sampling={**WIDE, "top_k": 200})
    batch = drawn(begun)
    assert counts(batch) == [(4, 0, 3, 0)] * 16
    whole = batch.sequences()
    assert torch.equal(whole["input_ids"].values, batch["input_ids"].values)
    for place in range(16):
        (_, first), (_, second), (_, third) = responses(begun, whole.take(range(3 * place, 3 * place + 3)))
        assert (set(first), second[:9], set(second[9:]), set(third)) == ({"x"}, "xxxxxxxx.", {"x"}, {"x"})
        ids = whole["input_ids"].split()[3 * place : 3 * place + 3]
        assert torch.equal(ids[1][: -len(second) + 9], ids[2][: -len(third)]), (
            "both go on after the same turn"
        )
    kept = [int(each.abs().sum()) for each in whole["kept_counts"].split()]
    assert list(whole["kept_tokens"].lengths) == kept
    assert torch.equal(whole["kept_counts"].values != 0, whole["response_mask"].values)


def test_what_is_drawn_when_its_agent_has_ended_is_no_part_of_the_sample(run, monkeypatch):
    is_drawn = _Episodes.ended

    def late(self, sample, turn):
        """The second answer of an agent is there when the agent has ended."""
        draw, until_s = self._now[sample], time.monotonic() + 60
        while draw.number == 1 and self._of[draw.request.sample].ended is None:
            assert time.monotonic() < until_s, "the agent does not end"
            self._hear(0.1)
        is_drawn(self, sample, turn)

    monkeypatch.setattr(_Episodes, "ended", late)
    begun = run("leaves 0.3", sampling=WIDE)
    batch = drawn(begun, range(2))
    assert [branches for _, _, branches, _ in counts(batch)] == [1, 1]
    assert {marks for _, marks in responses(begun, batch)} <= {"x", "xx"}


def test_branches_without_room_are_left_out_those_with_the_fewest_drawn_tokens_first(run):
    begun = run("branches")
    for (requests, refused, branches, left_out), ids in zip(
        counts(drawn(begun)), drawn(begun)["input_ids"].split(), strict=True
    ):
        assert (requests, refused) == (4, 0)
        assert branches < 3
        assert 1 <= left_out <= 7
        assert len(ids) <= 30 + 9
    assert begun.iterate(1)[0]["agent/left_out"] > 2


def test_an_answer_has_the_stop_strings_that_min_new_tokens_lets_be(run):
    settings = {"max_completion_length": 32, "min_new_tokens": 6}
    assert min(map(len, drawn(run("stops", sampling=settings))["input_ids"].split())) > 6


def test_what_is_far_too_long_is_refused_before_it_is_read(run, capfd):
    assert len(counts(drawn(run("long", sampling={"max_completion_length": 8}), range(1)))) == 1
    complained = capfd.readouterr().err
    assert "the request has 10,000 characters; a sample has at most" in complained
    assert "a request has at most 2,097,152 bytes" in complained


def test_each_failure_costs_one_sample(run, tmp_path):
    begun = run("moody", limits={"max_requests": 8, "timeout_s": 5}, on_reward_error="skip")
    metrics, store = begun.iterate(0)
    batch = store.get(range(16), ["stays", "scores", "input_ids", "response_mask"])
    stays = batch["stays"].values
    assert metrics["skipped_samples"] == 16 - stays.sum() > 8
    assert metrics["agent/refused"] > 2 / 16, "each that is greedy asks twice in vain"
    assert all(mask.any() for mask in batch["response_mask"].split()), "a sample has something drawn"
    listed = lines(tmp_path / "skipped-samples/00000000-0000.jsonl")
    assert {line["reward"] for line in listed} == {"agent"}
    who = f"agent {sys.executable} {FILE} moody: it "
    assert {line["reason"].removeprefix(who) for line in listed} == {
        "exited with status 1: no such door.",
        'gave no reward: the last line of its output is no {"reward": NUMBER}, and the run has no rewards.',
        "gave no reward: the reward 'much' is no finite number.",
        "exited with status 1: 400 context_length_exceeded.",
        "asked for more than 8 answers, which agent.max_requests allows.",
        "did not end in 5 s, which agent.timeout_s sets.",
    }


def test_a_failure_stops_the_run_where_none_is_skipped(run):
    with pytest.raises(RewardError) as caught:
        drawn(run("fails"))
    assert str(caught.value).startswith(
        f"agent {sys.executable} {FILE} fails: it exited with status 1: no such door. It was at sample "
    )


def test_rewards_judge_what_an_agent_has_drawn(run):
    reward = {"function": f"{FILE.with_name('tiny_reward.py')}:length_reward"}
    metrics, store = run("silent", rewards=[reward]).iterate(0)
    samples = store.get(range(16), ["scores", "environment_rewards"])
    assert not samples["environment_rewards"].values.any()
    assert metrics["rewards/length_reward/mean"] == pytest.approx(samples["scores"].values.mean().item())


def test_an_evaluation_plays_with_the_agent_too(folder):
    config = grpo_config(folder, **agent("echo"), evaluation={"data": str(folder / "prompts.jsonl")})
    evaluation = evaluation_of(config)
    assert evaluation is not None
    assert (evaluation.agent, evaluation.score_names) == (config.agent, ["agent"])


def test_a_conversation_goes_on_with_the_calls_as_they_were_drawn(run, tmp_path_factory):
    tools = tmp_path_factory.mktemp("tools")
    changes = {"tools": [], "rewards": [], "sampling": {"max_completion_length": 160}}
    begun = run("chats", make=lambda _, **more: config_of(tools, **changes | more))
    batch = drawn(begun)
    calls = 0
    for (ids, marks), (_, _, branches, _) in zip(responses(begun, batch), counts(batch), strict=True):
        assert branches == 1, "each request continues the one before it"
        said = begun.tokenizer.decode(ids, special_tokens=True)
        calls += "<r>" in said
        assert marks.startswith("x")
    assert calls > 2


@pytest.fixture(scope="module")
def frameworks(tmp_path_factory):
    """The interpreter of an environment with frameworks of agents, as they are in the registry."""
    folder = tmp_path_factory.mktemp("frameworks")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *FRAMEWORKS], check=True, timeout=600)
    return python


@pytest.fixture
def framework(run, frameworks, tmp_path_factory):
    """(metrics, samples) of an iteration, by the file of an agent that is written with a framework"""
    tools = written(tmp_path_factory.mktemp("tools"))
    config = tools / "actor/config.json"  # a framework says much
    config.write_text(
        config.read_text().replace('"max_position_embeddings": 512', '"max_position_embeddings": 4096')
    )

    def play(file):
        changes = {"tools": [], "rewards": [], "sampling": {"max_completion_length": 2800}, **agent("")}
        command = f"{frameworks} {FILE.with_name(file)}"
        changes |= {"agent": {"command": command, "at_once": 2}, "on_reward_error": "skip"}
        metrics, store = run("", make=lambda _, **more: config_of(tools, **{**more, **changes})).iterate(0)
        return metrics, store.get(range(16), ["stays", "input_ids", "response_mask", "environment_rewards"])

    return play


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_openais_agents_sdk_is_a_rollout_as_it_is(framework):
    metrics, batch = framework("framework_agent.py")
    assert batch["stays"].values.sum() >= 12, metrics
    assert batch["environment_rewards"].values.max() >= 3, "a call, its answer, and what was said of it"
    assert metrics["agent/requests"] > 1
    assert metrics["agent/branches"] == 1, "each request continues the one before it"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_so_is_an_agent_of_smolagents(framework):
    """It asks for two steps, with stop strings, and with none for a last answer, in other words. It adds the end of
    code to what was said: that goes on with an answer that is not over."""
    metrics, batch = framework("smol_agent.py")
    assert batch["stays"].values.sum() == 16, metrics
    assert batch["environment_rewards"].values.tolist() == [4.0] * 16, "the task, two steps, the last answer"
    assert metrics["agent/requests"] == 3
    assert metrics["agent/refused"] == metrics["agent/left_out"] == 0
    assert 2 <= metrics["agent/branches"] < 3


def chain(request, said="yes", tail="<eos>"):
    """An answer; with a tail in <> an end token has ended it, with another a stop string."""
    return Chain(request, (said, said), tail, {}, (0,), 1, cut=False, is_over=tail[:1] == "<")


def asked_for(messages=None, text="", tools=()):
    return Asked(0, 0, messages, text, list(tools), 1, None, [])


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("Ask: yes<eos>Next: ", "Next: "),
        ("Ask: yes, and: ", ", and: "),
        ("Ask: yes", ""),
        ("Ask: ", None),
        ("Ask: no", None),
    ],
)
def test_a_text_continues_a_chain(text, rest):
    assert chain(asked_for(text="Ask: ")).rest(asked_for(text=text), str) == rest


@pytest.mark.parametrize(("text", "rest"), [("Ask: ", None), ("Ask: <eos>Next", "Next"), ("Ask: Next", None)])
def test_a_text_continues_an_empty_answer_by_what_has_ended_it(text, rest):
    assert chain(asked_for(text="Ask: "), said="").rest(asked_for(text=text), str) == rest


def test_only_tokens_continue_tokens():
    assert chain(asked_for()._replace(ids=[1])).rest(asked_for(text="yes, and"), str) is None


USER, MORE = {"role": "user", "content": "Ask"}, {"role": "user", "content": "Next"}
YES = {"role": "assistant", "content": "yes"}


def rendered(messages):
    """As templates are whose history lacks what opens a turn."""
    return "".join(each["content"] + "<eos>" * (each["role"] == "assistant") for each in messages) + "<think>"


@pytest.mark.parametrize(
    ("messages", "rest"),
    [
        ([USER, YES, MORE], "Next<think>"),
        ([USER, {**YES, "content": "yes<eos>"}, MORE], "Next<think>"),
        ([USER, {**YES, "content": "yes, I think"}, MORE], None),
        ([USER, {**YES, "content": "no"}, MORE], None),
        ([MORE, YES, MORE], None),
        ([USER, MORE], None),
        ([USER], None),
    ],
)
def test_a_conversation_continues_a_chain_by_its_messages(messages, rest):
    assert chain(asked_for([USER])).rest(asked_for(messages), rendered) == rest


@pytest.mark.parametrize(
    ("said", "content", "rest"),
    [
        ("yes", "yes;", "<eos>Next<think>"),
        ("yes", "yes; 3", " 3<eos>Next<think>"),
        ("yes", "yes", "<eos>Next<think>"),
        ("", "; 3", " 3<eos>Next<think>"),
        ("", "(no answer)", None),
    ],
)
def test_a_turn_that_a_stop_string_has_ended_goes_on_with_what_the_agent_adds(said, content, rest):
    messages = [USER, {**YES, "content": content}, MORE]
    assert chain(asked_for([USER]), said, ";").rest(asked_for(messages), rendered) == rest


@pytest.mark.parametrize(("content", "rest"), [("", "Next<think>"), ("(no answer)", None)])
def test_nothing_takes_the_place_of_an_empty_answer(content, rest):
    messages = [USER, {**YES, "content": content}, MORE]
    assert chain(asked_for([USER]), said="").rest(asked_for(messages), rendered) == rest


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_of_calls_goes_on_with_what_tools_answer_in_any_template(name):
    template = _environment().from_string(TEMPLATES[name])

    def written(messages):
        return template.render(messages=messages, add_generation_prompt=True)

    call = {"id": "abc123456", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer = {"role": "tool", "name": "add", "tool_call_id": "abc123456", "content": "3"}
    history = [USER, said, answer, said, answer]
    messages = read_request({"messages": history}, True, Drawing(1.0, 1.0), {"abc123456": "as drawn"})[
        "messages"
    ]
    end = "<|im_end|>"
    for place in (1, 3):
        begun = chain(asked_for(messages[:place]), "as drawn", end)
        rest = begun.rest(asked_for(messages[: place + 2]), written, [end])
        assert written(messages[: place + 2]).endswith(f"{end}{rest}")
        assert "3" in rest.partition("<|im_start|>assistant")[0]
    assert chain(asked_for(messages[:1]), "else", end).rest(asked_for(messages[:3]), written, [end]) is None


def test_calls_that_the_policy_has_not_made_continue_no_empty_answer():
    called = {**YES, "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    assert chain(asked_for([USER]), said="").rest(asked_for([USER, called, MORE]), rendered) is None


def test_it_does_not_with_other_tools_nor_as_a_text():
    assert chain(asked_for([USER])).rest(asked_for([USER, YES], tools=[{}]), rendered) is None
    assert chain(asked_for([USER])).rest(asked_for(text="Askyes"), rendered) is None
    assert chain(asked_for(text="Ask")).rest(asked_for([USER, YES]), rendered) is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"agent": {"command": "a"}}, "both would answer the model"),
        ({**agent("echo"), "sampling": {**SAMPLING, "segment_tokens": 8}}, "cuts responses of one turn"),
        (agent("echo 'open"), "is no command: No closing quotation"),
        (agent("echo", max_requests=0), "max_requests"),
        ({**agent("echo"), "type": "remax"}, "no environment answers"),
    ],
)
def test_what_agents_cannot_do_is_refused(folder, changes, sentence):
    def calls():
        config = grpo_config(folder, **changes)
        return algorithm(config.type).calls(config)

    with pytest.raises(ConfigError, match=sentence):
        calls()
