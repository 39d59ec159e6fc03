"""`prefect-rlhf chat` and `generate`: a trained model is tried in the terminal."""

import io
import json
import signal
import subprocess
import sys
import time

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.flows.run.run_folder import new_run_folder
from tests.adapter_folders import commit_of, write_adapter
from tests.flows.run_folders import write_run
from tests.ppo_calls import PPO_CALLS
from tests.rlhf_tasks.algorithms.one_rank import world_of_one
from tests.tiny_runs import ppo_config, write_model

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
GREEDY = ("--temperature", "0", "--max-new-tokens", "12")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("models") / "tiny")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def plain(model, prompt: str, tokens: int = 12) -> str:
    """What transformers continues a prompt with."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    given = AutoModelForCausalLM.from_pretrained(model).generate(
        **ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    return tokenizer.decode(given[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.filterwarnings("ignore")  # transformers on settings of sampling
def test_a_text_is_continued_as_transformers_continues_it(call, model):
    status, out, err = call("generate", str(model), "--prompt", "1f says ", *GREEDY)
    assert status == 0, err
    assert out == plain(model, "1f says ") + "\n"


@pytest.mark.filterwarnings("ignore")
def test_an_adapters_folder_is_its_model_with_the_adapter(call, model, tmp_path):
    write_adapter(tmp_path / "adapter", model).save_pretrained(tmp_path / "merged")
    outs = [call("generate", str(tmp_path / "adapter"), "--prompt", "1f says ", *GREEDY)[1]]
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "merged")
    outs.append(call("generate", str(tmp_path / "merged"), "--prompt", "1f says ", *GREEDY)[1])
    assert outs[0] == outs[1] != call("generate", str(model), "--prompt", "1f says ", *GREEDY)[1]


def test_rows_are_completed_in_order_with_their_columns(call, model, tmp_path):
    rows = [{"prompt": f"{i} says ", "n": i} for i in range(40)]
    file, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--max-new-tokens", "4", "--seed", "3")
    status, said, err = call("generate", str(model), "--file", str(file), "--out", str(out), *options)
    assert (status, said) == (0, ""), err
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [{key: row[key] for key in ("prompt", "n")} for row in written] == rows
    printed = call("generate", str(model), "--file", str(file), *options)[1]
    assert printed == out.read_text()
    assert printed != call("generate", str(model), "--file", str(file), *options[:2], "--seed", "4")[1]


def test_conversations_in_a_file_are_answered_by_the_template(call, model, tmp_path):
    file = tmp_path / "rows.jsonl"
    asked = [{"role": "user", "content": "hi"}]
    file.write_text(json.dumps({"prompt": asked}) + "\n" + json.dumps({"prompt": "u:hi<eos>a:"}) + "\n")
    one, other = map(json.loads, call("generate", str(model), "--file", str(file), *GREEDY)[1].splitlines())
    assert one["completion"] == other["completion"]


def test_the_model_of_a_finished_run_is_tried(call, document, tmp_path, model):
    run = write_run({**document, "name": "mine"}, [0.5])
    status, _, err = call("generate", str(run), "--prompt", "x")
    assert (status, "mine has no model yet: nothing is committed." in err) == (2, True)
    (run / "model").symlink_to(model)
    assert call("generate", str(run), "--prompt", "1f says ", *GREEDY)[0] == 0


@pytest.mark.filterwarnings("ignore")
def test_the_model_that_a_run_left_before_it_was_continued_is_not_tried(call, model, tmp_path):
    alone = {"plan": dict.fromkeys(PPO_CALLS, "0"), "cluster": {"devices_per_host": 1}}
    config = ppo_config(tmp_path, name="mine", lora={"rank": 4, "alpha": 6.0, "export": "merged"}, **alone)
    run = new_run_folder(config)
    with world_of_one():
        commit_of(config, prepare(config).plan, run)  # step 1
    (run / "model").symlink_to(model)
    answers = {}
    for step in (1, 0):
        (run / "summary.json").write_text(json.dumps({"model_step": step}))
        status, answers[step], err = call("generate", str(run), "--prompt", "1f says ", *GREEDY)
        assert status == 0, err
        assert ("the model after 1 iterations, as it was committed" in err) == (step == 0)
    assert answers[1] == plain(model, "1f says ") + "\n" != answers[0]


def test_a_model_of_the_hub_is_tried_by_its_id(call, hub, model, tmp_path):
    hub.add_folder("org/tiny", model)
    with hub.used_here(tmp_path / "home"):
        status, out, err = call("generate", "org/tiny", "--prompt", "1f says ", *GREEDY)
    assert (status, out) == call("generate", str(model), "--prompt", "1f says ", *GREEDY)[:2], err


def test_rows_of_the_hub_are_completed_by_their_id(call, hub, model, tmp_path):
    rows = '{"prompt": "1f says "}\n'
    hub.add("org/rows", {"data/test.jsonl": rows}, "dataset")
    (tmp_path / "rows.jsonl").write_text(rows)
    with hub.used_here(tmp_path / "home"):
        status, out, err = call("generate", str(model), "--file", "org/rows", *GREEDY)
    assert status == 0, err
    assert out == call("generate", str(model), "--file", str(tmp_path / "rows.jsonl"), *GREEDY)[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "Give either --prompt TEXT or --file ROWS."),
        (("--prompt", ""), "--prompt is empty"),
        (("--prompt", "x", "--temperature", "-1"), "--temperature -1: a temperature is a number from 0"),
        (("--prompt", "x", "--max-new-tokens", "0"), "--max-new-tokens 0: a number of tokens"),
        (("--prompt", "x" * 200), "the prompt has 200 tokens, and the model's context 128. Shorten it."),
        (("--file", ""), "--file is empty"),
        (
            ("--file", "hf://datasets/org/name"),
            "hf://datasets/org/name: neither a name of a data set nor a path.",
        ),
        (("--file", "EMPTY"), "has no rows."),
        (("--file", "GONE"), "no such file or folder"),
        (("--file", "OTHER"), "other.jsonl:1: has no column 'prompt'"),
        (("--file", "OTHER", "--out", "OTHER"), "other.jsonl already exists."),
    ],
)
def test_what_cannot_be_answered_is_refused(call, model, tmp_path, options, said):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "other.jsonl").write_text('{"height": 1}\n')
    names = {"EMPTY": "empty.jsonl", "GONE": "gone.jsonl", "OTHER": "other.jsonl"}
    given = [str(tmp_path / names[each]) if each in names else each for each in options]
    status, _, err = call("generate", str(model), *given)
    assert (status, said in err) == (2, True), err


def test_a_try_that_failed_before_its_first_row_leaves_no_file_in_the_way_of_the_next(call, model, tmp_path):
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text('{"height": 1}\n')
    assert call("generate", str(model), "--file", str(rows), "--out", str(out))[0] == 2
    assert not out.exists()


@pytest.mark.parametrize("command", [("chat", "PLACE"), ("generate", "PLACE", "--prompt", "x")])
def test_a_folder_without_a_model_is_refused(call, tmp_path, command):
    place = tmp_path / "nothing"
    given = [str(place) if part == "PLACE" else part for part in command]
    assert "nothing is no folder. Name the folder of a run or of a model." in call(*given)[2]
    place.mkdir()
    assert "nothing has no model: neither config.json nor adapter_config.json." in call(*given)[2]


def test_a_run_that_is_not_there_is_not_asked_for_at_the_hub(call, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with hub.used_here(tmp_path / "home"):
        assert "runs/mine is no folder. Name the folder" in call("chat", "runs/mine")[2]
    assert not hub.requests


def test_a_reward_model_gives_no_text(call, tmp_path):
    write_model(tmp_path / "reward", head="scalar")
    assert "holds a reward model, which gives no text" in call("chat", str(tmp_path / "reward"))[2]


def test_a_chat_without_template_is_refused_with_what_works(call, tmp_path):
    write_model(tmp_path / "base")
    status, _, err = call("chat", str(tmp_path / "base"))
    assert (status, "has no chat template, so it takes no messages. Use `prefect-rlhf generate" in err) == (
        2,
        True,
    )


def test_a_chat_remembers_what_was_said(call, model, monkeypatch, tmp_path):
    """The second answer continues the whole conversation."""
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nwhy\n"))
    status, out, err = call("chat", str(model), "--system", "be", *GREEDY)
    assert status == 0, err
    first = call("generate", str(model), "--prompt", "s:be<eos>u:hi<eos>a:", *GREEDY)[1]
    assert out.startswith(first)
    both = f"s:be<eos>u:hi<eos>a:{first[:-1]}<eos>u:why<eos>a:"
    assert out == first + call("generate", str(model), "--prompt", both, *GREEDY)[1]


def test_a_conversation_that_fills_the_context_begins_anew(call, model, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{'a' * 90}\n{'b' * 90}\n{'c' * 200}\nhi\n"))
    status, out, err = call("chat", str(model), *GREEDY)
    assert status == 0, err
    assert "(The model's context of 128 tokens is full: the conversation begins anew.)" in out
    assert "error: the prompt has 205 tokens, and the model's context 128. Shorten it." in out


def test_ctrl_c_ends_a_chat_without_a_traceback(model):
    command = [sys.executable, "-m", "prefect_rlhf.flows.cli", "chat", str(model)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as chat:
        assert chat.stderr is not None
        while "s\n" not in (line := chat.stderr.readline()):
            assert line, "the chat has ended"
        time.sleep(0.5)
        chat.send_signal(signal.SIGINT)
        out, err = chat.communicate(timeout=60)
    assert (chat.returncode, out.strip(), err) == (0, "", "")
