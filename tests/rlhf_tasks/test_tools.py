"""Calls of tools in runs: any plan gives the same losses; what tools answer is context alone; all is counted."""

import json
import re
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, make_config
from prefect_rlhf.rlhf_tasks.algorithms.examples import prepared_rows
from prefect_rlhf.rlhf_tasks.algorithms.functions import fetch
from prefect_rlhf.rlhf_tasks.algorithms.held_out import evaluation_of
from prefect_rlhf.rlhf_tasks.data.dataset import DataError
from prefect_rlhf.rlhf_tasks.data.tokenizer import Tokenizer
from prefect_rlhf.rlhf_tasks.user_code.tools.formats import Malformed, calls_of
from tests.rlhf_tasks.algorithms.one_rank import runs_of_one
from tests.rlhf_tasks.test_environments import drawn, refuse_other_gradient, responses
from tests.rlhf_tasks.test_layout_invariance import PLANS, differences, other_plans, trajectory
from tests.tiny_runs import critic_free_config, ppo_config
from tests.tiny_tools import write_conversations, write_tool_model

pytestmark = pytest.mark.dist

FILE = str(Path(__file__).parents[1] / "tiny_tools.py")
TOOLS: dict[str, Any] = {
    "tools": [{"function": f"{FILE}:add"}],
    "rewards": [{"function": f"{FILE}:answer_reward"}],
    "sampling": {"max_completion_length": 160},
    "environment": {"max_turns": 3, "max_turn_tokens": 6},
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


def written(folder):
    if not (folder / "actor").exists():
        write_tool_model(folder / "actor")
        write_tool_model(folder / "reward", seed=2, head="scalar")
        write_conversations(folder / "prompts.jsonl")
    return folder


def config_of(folder, make: Any = critic_free_config, **changes):
    document = (
        {"type": "grpo", "num_generations": 4, "dtype": "float64"} if make is critic_free_config else {}
    )
    return make(written(folder), **{**document, **TOOLS, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model that calls tools, and prompts."""
    return written(tmp_path_factory.mktemp("tools"))


@pytest.fixture
def run(folder, tmp_path):
    """Begin a run of GRPO on this process."""
    with runs_of_one(config_of, folder, tmp_path) as begin:
        yield begin


@other_plans(PLANS)
@pytest.mark.whole
def test_the_same_seed_gives_the_same_losses_under_any_plan(ranks, tmp_path, names):
    config: Any = partial(config_of, make=ppo_config)
    reference = trajectory(ranks, tmp_path, *PLANS["one rank"], config)
    assert len({seen["actor_train/loss/policy"] for seen in reference}) == 3
    assert all(seen["actor_generate/tools/calls"] > 0.2 for seen in reference)
    for name in names:
        assert not differences(reference, trajectory(ranks, tmp_path, *PLANS[name], config)), name


def parts_of(run, batch):
    """Of each sample its turns and what tools answered: (x or ., text) in their order."""
    decode = partial(run.tokenizer.decode, special_tokens=True)
    return [
        [
            (mark, decode([token for token, _ in part]))
            for mark, part in groupby(zip(ids, marks, strict=True), key=itemgetter(1))
        ]
        for ids, marks in responses(run, batch)
    ]


def answer_to(call):
    if isinstance(call, Malformed):
        return f"error: {call.reason}"
    a, b = call.arguments.values()
    return "error: ValueError: 0 twice" if a == b else str(a + b)


def test_each_call_of_a_turn_is_answered_as_the_template_writes_it_and_only_what_is_drawn_is_marked(run):
    begun = run()
    batch = drawn(begun)
    several: dict[str, int] = {}
    for parts in parts_of(begun, batch):
        for (mark, said), (other, read) in zip(parts[::2], parts[1::2], strict=False):
            assert (mark, other) == ("x", ".")
            answers = [answer_to(call) for call in calls_of(said, "hermes", {"add": SCHEMA})]
            end = "" if said.endswith("<eos>") else "<eos>"
            assert read == end + "".join(f"<r>{answer}</r>" for answer in answers) + ">"
            several |= {each: max(len(answers), several.get(each, 0)) for each in answers}
        assert len(parts) % 2, "a response ends with what was drawn"
    assert {"3", "error: ValueError: 0 twice", "error: the argument 'b' is missing"} <= several.keys()
    assert max(several.values()) > 1, "a turn has several calls"
    assert torch.all(batch["old_logprobs"].values[~batch["response_mask"].values] == 0)
    assert batch["environment_rewards"].values.sum() == 0


def test_calls_are_counted_for_metrics_and_rewards_which_judge_the_last_turn(run, tmp_path):
    begun = run()
    metrics, store = begun.iterate(0)
    batch = store.get(range(16), ["input_ids", "response_mask", "tool_calls", "scores", "truncated"])
    wanted, lasts, cut = [], [], []
    for parts in parts_of(begun, batch):
        calls = [
            call for mark, said in parts if mark == "x" for call in calls_of(said, "hermes", {"add": SCHEMA})
        ]
        failed = sum(answer_to(call).startswith("error: ValueError") for call in calls)
        wanted.append([len(calls), sum(isinstance(call, Malformed) for call in calls), failed])
        lasts.append(parts[-1][1].removesuffix("<eos>"))
        cut.append(not parts[-1][1].endswith("<eos>") or bool(calls_of(lasts[-1], "hermes", {"add": SCHEMA})))
    assert torch.stack(batch["tool_calls"].split()).tolist() == wanted
    assert batch["truncated"].values.tolist() == cut
    assert True in cut
    assert False in cut
    totals = [sum(column) / 16 for column in zip(*wanted, strict=True)]
    assert [metrics[f"tools/{name}"] for name in ("calls", "malformed", "failed")] == totals
    assert min(totals) > 0
    judged = [len(t) / 16 + n - 0.5 * m - 0.25 * f for t, (n, m, f) in zip(lasts, wanted, strict=True)]
    assert batch["scores"].values.tolist() == pytest.approx(judged)
    assert "rewards/Tools/mean" not in metrics
    [path] = (tmp_path / "samples").glob("*.jsonl")
    assert {*json.loads(path.read_text().splitlines()[0])["rewards"]} == {"answer_reward"}


def test_the_gradient_is_that_of_the_drawn_tokens_alone(run, folder):
    refuse_other_gradient(run(beta=0.0), folder)


def test_a_sequence_does_not_depend_on_those_beside_it(run):
    whole, some = drawn(run()), drawn(run(reward_processes=3), range(5, 12))
    assert responses(run(), some) == responses(run(), whole)[5:12]
    counts = [each.tolist() for each in whole["tool_calls"].split()]
    assert [each.tolist() for each in some["tool_calls"].split()] == counts[5:12]


def test_prompts_offer_the_tools_and_an_evaluation_has_them_too(folder):
    config = config_of(folder, evaluation={"data": str(folder / "prompts.jsonl")})
    evaluation = evaluation_of(config)
    assert evaluation is not None
    for each in (config, evaluation):
        assert each.environment.factory == "builtin:Tools"
        rows = prepared_rows(each)
        ids = fetch(rows, each, [0])["prompt_ids"].values.tolist()
        text = Tokenizer.from_folder(each.models.tokenizer).decode(ids)
        assert re.fullmatch("add[0-9a-f]+ says (ab)*>", text)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"tools": [{"function": f"{FILE}:silent"}]},
            "tiny_tools.py:silent: .* has no docstring. Give it a type",
        ),
        (
            {"tools": [{"function": f"{FILE}:untyped"}]},
            "Argument a is missing a type hint .*. Give it a type",
        ),
        ({"tools": [{"function": f"{FILE}:none"}]}, "has no function 'none'"),
        (
            {"tools": [{"function": f"{FILE}:total"}]},
            r"total: the model gives arguments by name, but `\*numbers: int` takes none of a name",
        ),
        (
            {"tools": [{"function": f"{FILE}:add", "kwargs": {"c": 1}}]},
            "its kwargs give 'c', which is none of",
        ),
        (
            {"tools": [{"function": f"{FILE}:Notes", "kwargs": {"frist": "a"}}]},
            "Notes: its kwargs do not fit the class: missing a required argument: 'first'.",
        ),
        ({"tools": [{"function": "nowhere.py:add"}]}, "nowhere.py of the tools: no such file"),
        ({"tools": 2 * TOOLS["tools"]}, "tools: two are named 'add'. Rename one"),
        (
            {"tools": TOOLS["tools"], "data": {"max_prompt_tokens": 40}},
            r"tools: their schemas have \d+ tokens, but a prompt at most 40, by data.max_prompt_tokens",
        ),
    ],
)
def test_what_is_no_tool_is_refused_before_the_run(folder, changes, sentence):
    data = {"train": str(folder / "prompts.jsonl"), **changes.get("data", {})}
    with pytest.raises(ConfigError, match=sentence):
        prepared_rows(config_of(folder, **{**changes, "data": data}))


def test_so_are_prompts_of_text_and_templates_without_calls(folder, tmp_path):
    (tmp_path / "text.jsonl").write_text('{"prompt": "2 + 2"}\n')
    with pytest.raises(
        DataError, match=r"text.jsonl:1: the prompt is text, but a chat template offers the run's"
    ):
        prepared_rows(config_of(folder, data={"train": str(tmp_path / "text.jsonl")}))
    write_tool_model(tmp_path / "actor")
    models = {"models": {"actor": str(tmp_path / "actor")}}
    (tmp_path / "actor/chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(
        ConfigError, match=r"writes calls in no format that is known \(xml, .* Name one in tool_format"
    ):
        prepared_rows(config_of(folder, **models))
    with pytest.raises(ConfigError, match="does not write calls of tools, with an end token after them"):
        prepared_rows(config_of(folder, **models, tool_format="hermes"))
    deaf = "{% for m in messages %}{% for c in m.tool_calls %}<tool_call>{{ c }}<eos>{% endfor %}{% endfor %}"
    (tmp_path / "actor/chat_template.jinja").write_text(deaf)
    with pytest.raises(ConfigError, match="does not write what a tool answers"):
        prepared_rows(config_of(folder, **models))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"environment": {"factory": "builtin:GuessingGame"}},
            "tools answer the turns themselves. Leave out one",
        ),
        (
            {"tools": [], "environment": {"factory": "builtin:Tools"}},
            "builtin:Tools: name the tools in tools",
        ),
        (
            {"tools": [], "environment": None, "tool_format": "xml"},
            "tool_format=xml has no meaning without tools",
        ),
        ({"rewards": []}, "nothing scores the responses"),
    ],
)
def test_what_does_not_go_together_is_refused(folder, changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        config_of(folder, **changes)


def test_a_configuration_that_is_read_again_is_the_same(folder):
    config = config_of(folder)
    assert make_config(config.model_dump(mode="json")) == config
