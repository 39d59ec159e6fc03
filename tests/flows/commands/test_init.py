"""`prefect-rlhf init`: what it writes is checked, and runs as it is."""

import json
import os

import pytest
import yaml

from prefect_rlhf.rlhf_tasks.algorithms.configurations import load_config
from tests.flows.marked_command import MarkedCommand
from tests.tiny_runs import write_model

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
ROWS = {
    "grpo": {"prompt": "2 + 2 = ", "answer": "4"},
    "dpo": {"prompt": "Say a", "chosen": "aa", "rejected": "b"},
    "sft": {"prompt": "Say a", "completion": "aaa"},
    "kto": {"prompt": "Say a", "completion": "aaa", "label": True},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def write_rows(tmp_path):
    """Rows of a kind, each a little different, in a file."""

    def write(row, n=16):
        other = {"label": False} if "label" in row else {}
        first = next(iter(row))
        rows = [{**row, first: f"{row[first]}{i}", **(other if i % 2 else {})} for i in range(n)]
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
        return str(path)

    return write


@pytest.fixture
def begin(call, model, tmp_path):
    """Make a configuration in a folder of its own. Gives (status, standard output, standard error, its path)."""
    (tmp_path / "mine").mkdir()
    out = tmp_path / "mine" / "run.yaml"

    def run(*options):
        return *call("init", "--model", str(model), "--out", str(out), *options), out

    return run


@pytest.mark.parametrize("kind", ROWS)
def test_the_algorithm_follows_from_the_columns_and_the_file_is_valid(call, begin, write_rows, kind):
    status, said, err, out = begin("--data", write_rows(ROWS[kind]))
    assert status == 0, err
    assert f"prefect-rlhf run {kind} --config {out}" in said
    config = load_config(out)
    assert config.type == kind
    status, said, err = call("config", "validate", str(out))
    assert (status, f"{out}: valid. 16 rows" in said) == (0, True), err
    assert (out.parent / "rewards.py").exists() == (kind == "grpo")


@pytest.mark.parametrize(
    ("row", "gives"),
    [
        ({"prompt": "2 + 2 = ", "answer": "4"}, "reward correct: "),
        ({"prompt": "Capital of Norway?", "answer": "Oslo"}, "reward correct: "),
        ({"problem": "2 + 2 = ", "reward_model": {"ground_truth": "4"}}, "reward correct: "),
        ({"prompt": "2 + 2 = ", "Right answer": "4", "Answer": "4"}, "reward correct: "),
        ({"prompt": "Tell a story."}, "reward brief: 0."),
    ],
)
def test_the_reward_that_is_written_works_on_the_rows(call, begin, write_rows, row, gives):
    *_, out = begin("--data", write_rows(row))
    status, said, err = call("config", "validate", str(out), "--rewards")
    assert (status, gives in said) == (0, True), err


def test_the_examples_reward_tells_right_from_wrong(begin, tmp_path):
    *_, out = begin()
    module: dict = {}
    exec((out.parent / "rewards.py").read_text(), module)
    given = module["correct"](
        ["?"] * 4, ["It is 1,200.", "7", "none", [{"content": "12"}]], ["1200", "8", "9", "12"]
    )
    assert given == [1, 0, 0, 1]


@pytest.mark.parametrize(
    ("row", "rights"),
    [
        ({"prompt": "2 + 2 = ", "answer": "4"}, {"answer": ["none", None, ""]}),
        ({"prompt": "Capital of Norway?", "answer": "Oslo"}, {"answer": ["  ", None, ""]}),
        (
            {"prompt": "2 + 2 = ", "reward_model": {"ground_truth": "4"}},
            {"reward_model": [{"ground_truth": None}, None, {}]},
        ),
    ],
)
def test_where_there_is_no_right_answer_the_reward_that_is_written_is_0(begin, write_rows, row, rights):
    *_, out = begin("--data", write_rows(row))
    module: dict = {}
    exec((out.parent / "rewards.py").read_text(), module)
    assert module["correct"](["?"] * 3, ["None of these.", "none", ""], **rights) == [0, 0, 0]


@pytest.mark.parametrize("kind", ROWS)
def test_text_is_put_into_the_models_chat_template_where_it_has_one(call, tmp_path, write_rows, kind):
    model = write_model(tmp_path / "chats")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "mine").mkdir()
    out = tmp_path / "mine" / "run.yaml"
    status, _, err = call("init", "--model", str(model), "--data", write_rows(ROWS[kind]), "--out", str(out))
    assert status == 0, err
    assert load_config(out).data.as_messages
    assert call("config", "validate", str(out), *(["--rewards"] if kind == "grpo" else []))[0] == 0


def test_without_data_an_example_is_written(call, begin):
    status, _, err, out = begin()
    assert status == 0, err
    assert len((out.parent / "prompts.jsonl").read_text().splitlines()) == 64
    assert call("config", "validate", str(out), "--rewards")[0] == 0


def test_a_model_and_data_of_the_hub_are_named_by_their_ids_and_no_weights_are_fetched(
    call, hub, model, tmp_path
):
    hub.add_folder("org/tiny", model)
    rows = [{"question": f"What is {i} + 1?", "answer": f"So it is #### {i + 1}"} for i in range(20)]
    hub.add("org/sums", {"train.jsonl": "".join(json.dumps(row) + "\n" for row in rows)}, kind="dataset")
    (tmp_path / "mine").mkdir()
    out = tmp_path / "mine" / "run.yaml"
    with hub.used_here(tmp_path / "home"):
        status, _, err = call("init", "--model", "org/tiny", "--data", "org/sums", "--out", str(out))
        assert status == 0, err
        assert "model.safetensors" not in hub.downloads()
        document = yaml.safe_load(out.read_text())
        assert document["models"] == {"actor": "org/tiny"}
        assert document["data"]["train"] == "org/sums"
        assert document["data"]["column_map"] == {"question": "prompt"}
        status, said, err = call("config", "validate", str(out), "--rewards")
        assert (status, "valid. 20 rows" in said) == (0, True), err


def test_lengths_fit_the_rows_and_the_model(begin, write_rows):
    *_, out = begin("--data", write_rows({"prompt": "a" * 70, "answer": "1"}))
    document = yaml.safe_load(out.read_text())
    assert document["data"]["max_prompt_tokens"] + document["sampling"]["max_completion_length"] <= 128
    assert "the longest that was seen has 72" in out.read_text()


@pytest.mark.parametrize("there", ["run.yaml", "rewards.py", "prompts.jsonl"])
def test_nothing_is_overwritten(begin, tmp_path, there):
    (tmp_path / "mine" / there).write_text("mine")
    status, _, err, out = begin()
    assert (status, f"{there} already exists. Remove it, or name another folder" in err) == (2, True)
    assert os.listdir(out.parent) == [there]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "rows.jsonl: has no rows."),
        ('{"height": 1}\n', "rows.jsonl: its columns (height) say nothing of what to train."),
    ],
)
def test_data_that_says_nothing_is_refused_and_nothing_written(begin, tmp_path, content, said):
    (tmp_path / "rows.jsonl").write_text(content)
    status, _, err, out = begin("--data", str(tmp_path / "rows.jsonl"))
    assert (status, said in err) == (2, True), err
    assert not os.listdir(out.parent)


def test_a_folder_that_is_no_model_is_refused(call, tmp_path):
    (tmp_path / "mine").mkdir()
    status, _, err = call("init", "--model", str(tmp_path), "--out", str(tmp_path / "mine" / "a.yaml"))
    assert (status, "has no config.json" in err) == (2, True), err


@pytest.mark.whole
@pytest.mark.cluster
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_what_was_written_runs_as_it_is(begin, write_rows, tmp_path, kind):
    *_, out = begin("--data", write_rows(ROWS[kind]))
    with MarkedCommand(tmp_path / "log", "run", kind, "--config", str(out), f"output_dir={tmp_path}") as run:
        assert run.process.wait(600) == 0, run.output
        assert "done in" in run.output
