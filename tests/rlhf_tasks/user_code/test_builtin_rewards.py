"""Built-in rewards: what each gives, and the sentence with which it refuses what it cannot use."""

import json
import re
import sys
import tempfile
import venv
from typing import Any

import pytest

from prefect_rlhf.rlhf_tasks.user_code import builtin_rewards
from prefect_rlhf.rlhf_tasks.user_code.builtin_rewards import code_of
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError
from prefect_rlhf.rlhf_tasks.user_code.sandbox import _fault, _folder_bound
from tests.rlhf_tasks.user_code.numeric_answers import OTHER_VERDICTS, PAIRS


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def test_exact_match_compares_texts_or_what_a_pattern_finds():
    said = ["7", " 7 \n", "it is 7", "<a>3</a> no, <a>7</a>", chat("7")]
    rights = ["7"] * 5
    assert builtin_rewards.exact_match(said, answer=rights) == [1, 1, 0, 0, 1]
    assert builtin_rewards.exact_match(said, answer=rights, extract="<a>(.*?)</a>") == [0, 0, 0, 1, 0]
    assert builtin_rewards.exact_match(["Yes", "no"], label=["YES", None], ignore_case=True) == [1, 0]
    models = [{"style": "rule", "ground_truth": "7"}]
    assert builtin_rewards.exact_match(["7"], reward_model=models) == [1], "verl's rows"


def test_a_numeric_answer_is_the_last_number_or_the_marked_one_read_whole():
    wrong = [
        (said, gold, value)
        for said, gold, value in PAIRS
        if builtin_rewards.numeric_answer([said], answer=[gold]) != [value]
    ]
    assert wrong == []
    assert builtin_rewards.numeric_answer(["7"] * 3, answer=[7, "5 - 2 = 3\n#### 7", "$7$"]) == [1, 1, 1]


def test_a_numeric_answer_and_math_verify_differ_where_the_table_says_so():
    said, rights, values = zip(*PAIRS, strict=True)
    verified = builtin_rewards.math_verify(said, answer=rights)
    differ = {pair[:2] for pair, value, other in zip(PAIRS, values, verified, strict=True) if value != other}
    assert differ == OTHER_VERDICTS.keys()
    assert len(PAIRS) >= 200


@pytest.mark.parametrize(
    "text", ["\\boxed{" + "9" * 100_000 + "}", "9" * 5000, "\\boxed{9^9999}", "1e999", "1 " * 50_000]
)
def test_an_answer_made_to_take_long_is_read_at_once_or_not_at_all(text: str):
    assert builtin_rewards.numeric_answer([text], answer=["7"]) == [0]


def test_the_rows_of_several_sources_may_have_their_answers_in_different_columns():
    columns = {"answer": ["7", None, None], "reward_model": [None, {"ground_truth": "8"}, None]}
    assert builtin_rewards.exact_match(["7", "8", "9"], **columns) == [1, 1, 0]


def test_a_numeric_answer_may_be_off_by_a_relative_tolerance():
    assert builtin_rewards.numeric_answer(["3.14", "3.2"], answer=["3.1416"] * 2, tolerance=0.001) == [1, 0]


def test_math_verify_knows_equal_formulas():
    said = ["so it is $\\frac{1}{2}$", "$\\boxed{0.5}$", "$\\frac{1}{3}$", "no idea"]
    assert builtin_rewards.math_verify(said, answer=["\\frac{1}{2}"] * 4) == [1, 1, 0, 0]


def test_reasoning_gym_scores_by_the_task_that_the_row_names():
    from reasoning_gym import create_dataset

    items = list(create_dataset("basic_arithmetic", size=3, seed=1))
    metadata = [items[0]["metadata"], json.dumps(items[1]["metadata"]), items[2]["metadata"]]
    rights = [item["answer"] for item in items]
    said = [items[0]["answer"], f"<answer>{items[1]['answer']}</answer>", "nothing"]
    scored = builtin_rewards.reasoning_gym(
        said, answer=rights, metadata=metadata, extract="(?:<answer>)?([^<]+)"
    )
    assert scored[0] == 1
    assert scored[2] < 1
    assert builtin_rewards.reasoning_gym(
        said[1:2], answer=rights[1:2], metadata=metadata[1:2], extract=">(.*)<"
    ) == [1]


def test_a_format_is_a_pattern_for_the_whole_answer_or_a_part():
    said = ["<think>a\nb</think>7", "  <think></think>7\n", "7", "x <think></think>7"]
    assert builtin_rewards.format(said, pattern="<think>.*</think>.*") == [1, 1, 0, 0]
    assert builtin_rewards.format(said, pattern="<think>.*</think>", whole=False) == [1, 1, 0, 1]


def test_a_pattern_that_never_ends_is_named_with_the_answer():
    with pytest.raises(RewardError, match=r"takes more than 1 s on an answer") as caught:
        builtin_rewards.format(["aa", "a" * 60 + "b"], pattern="(a|aa)+$", whole=False)
    assert caught.value.place == 1


def test_length_counts_tokens_beside_a_target_or_limits():
    ids = [[0] * n for n in (0, 5, 10, 12, 14, 20)]
    said = [""] * len(ids)
    assert builtin_rewards.length(said, ids, most=10, within=4) == [0, 0, 0, -0.5, -1, -1]
    assert builtin_rewards.length(said, ids, least=5) == [-1, 0, 0, 0, 0, 0]
    assert builtin_rewards.length(said, ids, target=12, within=2) == [-1, -1, -1, 0, -1, -1]


ADD = "def add(a, b):\n    return a + b"


def passed(*codes: str, tests: Any = "assert add(1, 2) == 3", **kwargs: Any) -> list[float]:
    kwargs = {"sandbox": "process", **kwargs}
    return builtin_rewards.unit_tests(list(codes), tests=[tests] * len(codes), **kwargs)


def test_code_passes_where_every_test_of_its_row_does():
    right, wrong = f"I would say\n```python\n{ADD}\n```\nso there.", f"```\n{ADD} + 1\n```"
    assert passed(right, wrong, ADD, "no code at all") == [1, 0, 1, 0]
    assert passed(ADD, tests=["assert add(1, 2) == 3", "assert add(2, 2) == 5"]) == [0]
    assert passed(ADD, tests=json.dumps(["assert add(1, 2) == 3"])) == [1]
    assert code_of("```python\na\n```\n```py\nb\n```") == "b"


@pytest.mark.parametrize(
    "trick",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "while True: pass",
        "import time; time.sleep(60)",
        "x = bytearray(1 << 31)",
        "import os\nfor n in range(3, 64):\n    try: os.write(n, b'passed')\n    except OSError: pass\nos._exit(0)",
        "open('/tmp/large', 'wb').write(bytes(1 << 22))",
    ],
)
def test_code_that_ends_early_or_takes_too_much_does_not_pass(trick: str):
    assert passed(f"{trick}\n{ADD}", limit_s=1.0) == [0]


@pytest.mark.parametrize(
    "trick",
    [
        "import builtins; builtins.exec = lambda *_: None",
        "import builtins; builtins.compile = lambda *_: ''",
        "import __main__; __main__.exec = lambda *_: None",
        "import __main__; __main__.parts = []",
        "import __main__; __main__.parts.clear()",
    ],
)
def test_code_that_would_have_no_test_run_does_not_pass(trick: str):
    assert passed(f"try:\n    {trick}\nexcept AttributeError: pass\n{ADD} + 1") == [0]


bubblewrap = pytest.mark.skipif(bool(_fault()), reason=f"bubblewrap, {_fault()}")


@bubblewrap
def test_in_bubblewrap_code_sees_no_file_network_or_variable_of_the_user(tmp_path: Any, monkeypatch: Any):
    monkeypatch.setenv("MY_KEY", "canary")
    (tmp_path / "secret").write_text("canary")
    sees = {
        "a file": f"open({str(tmp_path / 'secret')!r})",
        "a variable": "import os; os.environ['MY_KEY']",
        "another process": "import os; assert len([p for p in os.listdir('/proc') if p.isdigit()]) > 3",
        "a network": "import socket; assert len(socket.if_nameindex()) > 1",
        "a place to write": "open('/usr/there', 'w')",
    }
    assert passed(*(f"{ADD}\n{code}" for code in sees.values()), sandbox="bwrap") == [0] * len(sees)
    assert passed(ADD, sandbox="bwrap") == [1]
    assert passed(f"open('/tmp/mine', 'w').write('x')\n{ADD}", sandbox="bwrap") == [1]
    assert passed(f"open('/dev/null', 'w').write('x')\n{ADD}", sandbox="bwrap") == [1]


@bubblewrap
@pytest.mark.skipif(not (_fault() or _folder_bound()), reason="bubblewrap before 0.7 bounds no folder")
def test_in_bubblewrap_the_files_of_a_program_have_a_bound():
    many = "for n in range({}):\n    open(f'{}/{{n}}', 'wb').write(bytes(1 << 20))\n" + ADD
    assert passed(many.format(20, "/tmp"), many.format(100, "/tmp"), sandbox="bwrap") == [1, 0]
    assert passed(many.format(1, "/dev/shm"), many.format(1, "/dev"), sandbox="bwrap") == [0, 0]


@bubblewrap
def test_bubblewrap_works_for_an_environment_below_tmp(monkeypatch: Any):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        venv.create(folder, with_pip=False, symlinks=True)
        monkeypatch.setattr(sys, "prefix", folder)
        monkeypatch.setattr(sys, "executable", f"{folder}/bin/python")
        assert passed(ADD, sandbox="bwrap") == [1]


def test_without_bubblewrap_code_is_refused_unless_the_user_opts_in(monkeypatch: Any):
    monkeypatch.setenv("PATH", "/nowhere")
    _fault.cache_clear()
    try:
        with pytest.raises(
            RewardError, match=r"bubblewrap, which is not installed\. Install it .* sandbox: process"
        ):
            passed(ADD, sandbox="bwrap")
        assert passed(ADD, sandbox="process") == [1]
    finally:
        _fault.cache_clear()


@pytest.mark.parametrize(
    ("name", "kwargs", "sentence"),
    [
        ("exact_match", {"question": ["?"]}, "rows have none of the columns answer, solution"),
        (
            "exact_match",
            {"answer": ["7"], "column": "right", "completion_ids": [[1]]},
            "rows have no column 'right' (columns: answer)",
        ),
        ("exact_match", {"answer": ["7"], "extract": "("}, "extract='(' is no regular expression"),
        ("numeric_answer", {"answer": ["seven"]}, "right answer 'seven' is no number. Judge formulas by"),
        ("numeric_answer", {"answer": ["7"], "tolerance": "1%"}, "tolerance must be a number of at least 0"),
        ("reasoning_gym", {"answer": ["7"], "metadata": ["x"]}, "metadata are no object"),
        ("reasoning_gym", {"answer": ["7"], "metadata": [{}]}, "name no task: source_dataset=None"),
        ("format", {}, "give the regular expression in kwargs"),
        ("length", {"completion_ids": [[1]]}, "give target, least or most"),
        ("length", {"completion_ids": [[1]], "most": 2, "least": 3}, "most must be a number of at least 3"),
        ("unit_tests", {"answer": ["7"]}, "none of the columns tests, test"),
        ("unit_tests", {"tests": [""], "sandbox": "docker"}, "sandbox='docker' is not one of bwrap, process"),
        ("unit_tests", {"tests": [{}], "sandbox": "process"}, "the row has no tests"),
    ],
)
def test_what_a_reward_cannot_use_is_one_sentence(name: str, kwargs: dict, sentence: str):
    with pytest.raises(RewardError, match=re.escape(sentence)):
        getattr(builtin_rewards, name)(completions=["7"], **kwargs)
