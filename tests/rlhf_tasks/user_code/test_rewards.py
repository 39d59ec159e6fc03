"""The helper process of Python rewards: every form, every way in which a reward can fail, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.system.child_pipes import MOST_OUTPUT_BYTES
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError
from prefect_rlhf.rlhf_tasks.user_code.forms import Answers
from prefect_rlhf.rlhf_tasks.user_code.rewards import RewardProcess
from tests.judged import LABELLED, SUMS, VERL, answers

pytestmark = pytest.mark.cluster

SUMS_ROWS = [{"prompt": f"{n}?", "ground_truth": str(n)} for n in (7, 15, 1)]
ROOT = Path(__file__).parents[3]
BROKEN = "second_user_rewards/broken.py"


@pytest.fixture
def start() -> Iterator[Any]:
    """Start the process of rewards, named as `file:function` of `tests/second_user_rewards`."""
    started: list[RewardProcess] = []

    def make(
        *names: str, kwargs: dict[str, Any] | None = None, blocks: Any = None, **settings: Any
    ) -> RewardProcess:
        places = [name.partition(":")[::2] for name in names]
        document = {
            "type": "ppo",
            "models": {"actor": "a"},
            "data": {"train": "d"},
            "sampling": {"max_completion_length": 4},
            "total_iterations": 1,
            "rewards": [
                {"function": f"{ROOT / 'tests/second_user_rewards' / file}.py:{name}", "kwargs": kwargs or {}}
                for file, name in places
            ],
            "reward_timeout_s": 100.0,
            **settings,
        }
        started.append(RewardProcess(make_config(document), iterations=10, blocks=blocks))
        return started[-1]

    yield make
    for process in started:
        process.close()


def judge(process: RewardProcess, judged: Answers = SUMS, iteration: int = 0) -> dict[str, list]:
    return dict(process.submit(judged, iteration).result(timeout=110).values)


@pytest.mark.parametrize(
    ("judged", "expected"),
    [
        (
            SUMS,
            {
                "trl:exact": [1.0, 0.0, 1.0],
                "trl:length": [0.05, 0.1, 0.35],
                "trl:token_count": [0.125, 0.25, 0.875],
                "trl:with_prompts": [1.0] * 3,
                "trl:everything": [0.5] * 3,
                "trl:for_sums": [1.0, 1.0, None],
                "trl:slow": [1.0] * 3,
                "trl:by_progress": [0.4] * 3,
                "trl:logging": [1.0] * 3,
                "trl:Threshold": [1.0] * 3,
                "trl:AsyncThreshold": [1.0] * 3,
                "trl:made": [1.0, 1.0, 0.0],
            },
        ),
        (
            VERL,
            {
                "trl:chat_format": [1.0, 1.0],
                "verl:compute_score": [1.0, 0.0],
                "verl:detailed": [1.0, -1.0],
                "verl:with_arguments": [1.0, 2.0],
                "verl:loop_score": [0.0, 1.0],
                "verl:batched": [0.1, 0.2],
            },
        ),
        (
            LABELLED,
            {
                "openrlhf:as_list": [1.0, 0.0],
                "openrlhf:reward_func": [1.0, 1.0],
                "openrlhf:as_tensor": [1.0, 1.0],
                "openrlhf:scores_only": [0.25, 0.25],
            },
        ),
    ],
    ids=["TRL", "verl", "OpenRLHF"],
)
def test_every_documented_form_is_called_its_way_again_and_again(start: Any, judged: Answers, expected: dict):
    process = start(*expected)
    values = {name.partition(":")[2]: value for name, value in expected.items()}
    assert judge(process, judged, iteration=4) == values
    assert judge(process, judged, iteration=4) == values


def test_kwargs_go_to_a_function_and_make_an_object(start: Any):
    assert judge(start("verl:with_arguments", kwargs={"scale": 3.0}), VERL) == {"with_arguments": [3.0, 6.0]}
    assert judge(start("trl:Threshold", kwargs={"most": 2})) == {"Threshold": [1.0, 1.0, 0.0]}


def test_what_rewards_log_comes_back_with_their_values(start: Any):
    judged = start("trl:logging").submit(SUMS).result(timeout=110)
    assert judged.logged == {"logging": {"length": [1, 2, 7], "mean_length": 10 / 3}}


def test_what_a_reward_prints_is_no_answer_and_a_rank_may_have_many_files_open(start: Any):
    """Its files have numbers that `select` does not take."""
    opened = [os.dup(0) for _ in range(1100)]
    try:
        assert judge(start("broken:prints")) == {"prints": [1.0] * 3}
    finally:
        for each in opened:
            os.close(each)


def line_of(text: str) -> str:
    """`FILE:LINE` of a line of broken.py."""
    lines = (ROOT / "tests" / BROKEN).read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if text in line)
    return f"{BROKEN}:{number}"


@pytest.mark.parametrize(
    ("name", "sentence", "line", "place"),
    [
        ("raises", "reward 'raises' raised KeyError: '7' at ", 'return {"one": 1.0}[truth]', 0),
        ("raises_on_one", "raised ZeroDivisionError: division by zero at ", "return [1 / (prompt", 1),
        ("leaves", "reward 'leaves' raised SystemExit: no key at ", "sys.exit(", 0),
        ("exits", "reward 'exits' ended its process with exit status 3.", None, None),
        ("crashes", "reward 'crashes' ended its process with SIGSEGV at ", "os.kill(os.getpid(), 11)", None),
        ("nan", "reward 'nan' returned nan: not a finite number.", None, 2),
        ("missing", "has no function 'missing'.", None, None),
    ],
)
def test_every_fault_is_named_with_the_answer_and_the_line(
    start: Any, name: str, sentence: str, line: Any, place: Any
):
    with pytest.raises(RewardError) as caught:
        judge(start(f"broken:{name}"))
    assert sentence in str(caught.value)
    assert caught.value.place == place
    if line is not None:
        assert line_of(line) in str(caught.value)
        assert line_of(line).split(":")[0] in caught.value.traceback
        assert line in caught.value.traceback
    assert "rlhf_tasks" not in caught.value.traceback
    assert "asyncio" not in caught.value.traceback


def test_a_late_reward_ends_at_its_deadline_and_says_where_it_was(start: Any):
    lines = {
        "hangs": "time.sleep(600)",
        "stuck_in_a_regex": "return [float(bool(re.match(",
        "waits_for_ever": "await asyncio.sleep(600)",
    }
    late = {name: start(f"broken:{name}", reward_timeout_s=8.0) for name in lines}
    judged = {name: process.submit(SUMS) for name, process in late.items()}  # all of them at once
    for name, line in lines.items():
        with pytest.raises(RewardError) as caught:
            judged[name].result(timeout=110)
        assert f"reward {name!r} gave no answer in 8 s at " in str(caught.value)
        assert line_of(line) in str(caught.value)
        assert "raise reward_timeout_s." in str(caught.value)
        assert line in caught.value.traceback
        assert late[name].processes[0].pid is None


def test_a_reward_that_takes_too_much_memory_is_ended_and_the_figure_told(start: Any):
    with pytest.raises(RewardError) as caught:
        judge(start("broken:takes_memory", reward_memory_bytes=600_000_000))
    assert "reward 'takes_memory' takes 0." in str(caught.value)
    assert "reward_memory_bytes allows 0.6 GB" in str(caught.value)
    assert line_of('block += b"x"') in str(caught.value)


def test_memory_that_a_module_takes_at_its_import_is_seen_while_the_request_waits(start: Any, tmp_path: Path):
    """The request is larger than a pipe, and the module does not end before the deadline."""
    (tmp_path / "mine.py").write_text("import time\nkept = b'x' * 700_000_000\ntime.sleep(60)")
    reward = {"function": f"{tmp_path / 'mine.py'}:good"}
    process = start(rewards=[reward], reward_memory_bytes=600_000_000, reward_timeout_s=15.0)
    large = answers({"prompt": "p" * 200_000}, completions=["c"])
    with pytest.raises(
        RewardError, match=r"of the rewards 'good' takes 0\.\d GB of memory at .*mine\.py:[23]; reward_memory"
    ):
        judge(process, large)


def test_a_fork_that_comes_back_too_says_nothing(start: Any):
    process = start("broken:forks")
    assert judge(process) == {"forks": [1.0] * 3}
    assert judge(process) == {"forks": [1.0] * 3}


@pytest.mark.parametrize("place", ["{folder}/my_module.py", "my_module"])
def test_a_module_that_cannot_be_imported_is_named(start: Any, tmp_path: Path, monkeypatch: Any, place: str):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_module.py").write_text("\nimport nothing_of_that_name")
    reward = {"function": f"{place.format(folder=tmp_path)}:good"}
    sentence = r"importing it raised ModuleNotFoundError.* at .*my_module\.py:2\."
    with pytest.raises(RewardError, match=sentence) as caught:
        judge(start(rewards=[reward]))
    assert "importlib" not in caught.value.traceback


# --- several processes, calls at once, kept values ----------------------------------------------------------


MANY = answers(
    *({"prompt": "?", "data_source": "second/sums", "ground_truth": str(n % 3)} for n in range(13)),
    completions=[f"{n:x} " * n for n in range(13)],
)


def test_several_processes_share_answers_and_rewards_and_change_no_value(start: Any):
    names = ("verl:compute_score", "verl:with_arguments", "verl:batched", "trl:length")
    alone, three = judge(start(*names), MANY), judge(start(*names, reward_processes=3), MANY)
    assert three == alone
    pids = [
        int(value)
        for value in judge(start("verl:in_which_process", reward_processes=3), MANY)["in_which_process"]
    ]
    assert len(set(pids)) == 3
    assert pids == (pids[:3] * 5)[:13]
    few = start("verl:compute_score", reward_processes=4)
    assert judge(few, VERL) == {"compute_score": [1.0, 0.0]}, "fewer answers than processes"


@pytest.mark.parametrize("processes", [1, 3])
def test_a_fault_in_one_of_several_processes_names_its_answer(start: Any, tmp_path: Path, processes: int):
    (tmp_path / "mine.py").write_text(
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float('nan') if solution_str.startswith('b') else 1.0\n"
    )
    process = start(rewards=[{"function": f"{tmp_path / 'mine.py'}:f"}], reward_processes=processes)
    with pytest.raises(RewardError, match="returned nan") as caught:
        judge(process, MANY)
    assert caught.value.place == 11


ONE_ANSWER = """
import asyncio
class Empty(Exception):
    def __len__(self):
        return 0
async def judge(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "hangs":
        await asyncio.sleep(600)
    if solution_str == "raises":
        raise Empty("nothing there")
    return 1.0
"""


def test_a_fault_ends_the_wait_for_other_answers_though_the_exception_is_false(start: Any, tmp_path: Path):
    (tmp_path / "mine.py").write_text(ONE_ANSWER)
    process = start(rewards=[{"function": f"{tmp_path / 'mine.py'}:judge"}], reward_timeout_s=500.0)
    with pytest.raises(RewardError) as caught:
        judge(process, replace(SUMS, completions=["hangs", "raises", "good"]))
    assert "raised Empty: nothing there at " in str(caught.value)
    assert caught.value.place == 1


def test_async_calls_run_at_once_as_many_as_are_allowed(start: Any):
    def most(**reward: Any) -> float:
        function = f"{ROOT / 'tests/second_user_rewards/verl.py'}:how_many_at_once"
        return max(judge(start(rewards=[{"function": function, **reward}]), MANY)["how_many_at_once"])

    assert most() == 13
    assert most(concurrency=2) == 2


@pytest.fixture
def counting(tmp_path: Path) -> Iterator[Any]:
    """(process with a reward that keeps its values, answers that it has judged); the source may be changed."""
    source = tmp_path / "mine.py"
    source.write_text((ROOT / "tests/second_user_rewards/verl.py").read_text())
    started: list[RewardProcess] = []

    def make(rank: int = 0, name: str = "counted", **kwargs: Any) -> RewardProcess:
        reward = {
            "function": f"{source}:{name}",
            "kwargs": {"file": str(tmp_path / "judged"), **kwargs},
            "cache": True,
        }
        config = make_config(
            {
                "type": "ppo",
                "models": {"actor": "a"},
                "data": {"train": "d"},
                "sampling": {"max_completion_length": 4},
                "total_iterations": 1,
                "rewards": [reward],
            }
        )
        started.append(RewardProcess(config, folder=tmp_path, writer=str(rank)))
        return started[-1]

    make.judged = lambda: (tmp_path / "judged").read_text().splitlines()
    make.source = source
    yield make
    for process in started:
        process.close()


def test_a_kept_value_is_not_judged_again_in_this_run_or_after_a_restart_on_another_rank(counting: Any):
    twice = answers(*SUMS_ROWS, completions=["7", "no", "it is 1"])
    process = counting()
    first = judge(process, twice)
    assert first == {"counted": [1.0, None, 7.0]}
    assert judge(process, twice) == first
    other = answers(*SUMS_ROWS, completions=["7", "15", "it is 1"])
    assert judge(process, other) == {"counted": [1.0, 2.0, 7.0]}
    process.close()
    assert judge(counting(rank=1), twice) == first
    assert counting.judged() == ["7", "no", "it is 1", "15"]


def test_answers_of_one_text_but_other_tokens_are_judged_apart(start: Any):
    """Which of them came first depends on the layout, and a value may depend on the tokens."""
    process = start(rewards=[{"function": "builtin:length", "kwargs": {"target": 1}, "cache": True}])
    given = answers(*SUMS_ROWS, completions=["aa"] * 3)
    for ids, value in ([5], 0.0), ([5, 6], -1.0):
        again = replace(given, completion_ids=[ids] * 3)
        assert judge(process, again) == {"length": [value] * 3}


def test_another_row_code_or_argument_is_judged_anew(counting: Any):
    judge(counting(), answers(*SUMS_ROWS, completions=["7", "no", "1"]))
    judge(counting(), answers(*reversed(SUMS_ROWS), completions=["7", "no", "1"]))
    assert counting.judged() == ["7", "no", "1", "7", "1"], "the middle row is the same"
    counting.source.write_text(counting.source.read_text() + "\n# changed\n")
    judge(counting(), answers(*SUMS_ROWS, completions=["7", "no", "1"]))
    assert len(counting.judged()) == 8


def test_a_line_cut_by_a_kill_costs_one_judgement(counting: Any, tmp_path: Path):
    judged = answers(*SUMS_ROWS, completions=["7", "no", "1"])
    judge(counting(), judged)
    (file,) = (tmp_path / "reward-values").iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    assert judge(counting(), judged) == {"counted": [1.0, None, 1.0]}
    assert judge(counting(rank=2), judged) == {"counted": [1.0, None, 1.0]}
    assert counting.judged() == ["7", "no", "1", "1"]


def test_a_fault_among_answers_that_are_not_kept_names_the_right_one(counting: Any):
    counting.source.write_text(
        "def some(completions, file, **columns):\n    return [1 / len(text) for text in completions]\n"
    )
    judge(counting(name="some"), answers(*SUMS_ROWS, completions=["7", "no", "1"]))
    with pytest.raises(RewardError, match="ZeroDivisionError") as caught:
        judge(counting(name="some"), answers(*SUMS_ROWS, completions=["8", "no", ""]))
    assert caught.value.place == 2


# --- processes ----------------------------------------------------------------------------------------------


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


def test_what_a_reward_starts_ends_with_it_at_a_good_end_too(start: Any, tmp_path: Path):
    process = start("broken:starts_a_process", kwargs={"pid_file": str(tmp_path / "pids")})
    judge(process)
    (pid,) = map(int, (tmp_path / "pids").read_text().split())
    assert alive(pid)
    process.close()
    assert gone(pid)


def pid_of(process: RewardProcess) -> int:
    pid = process.processes[0].pid
    assert pid is not None
    return pid


def hanging(process: RewardProcess) -> int:
    """The pid of a helper that is inside its reward."""
    while not process.processes[0].who.startswith("reward '"):
        time.sleep(0.01)
    return pid_of(process)


def test_closing_ends_a_reward_under_way(start: Any):
    process = start("broken:stuck_in_a_regex")
    pending = process.submit(SUMS)
    pid = hanging(process)
    process.close()
    assert gone(pid)
    with pytest.raises(RewardError):
        pending.result(timeout=5)


def test_a_helper_that_somebody_kills_is_started_again_and_leaves_nothing(start: Any, tmp_path: Path):
    pids = tmp_path / "pids"
    process = start("broken:starts_a_process", kwargs={"pid_file": str(pids)})
    assert judge(process) == {"starts_a_process": [1.0] * 3}
    for above in range(3):  # the helper, its keeper, and who keeps that
        helper = psutil.Process(pid_of(process))
        victim = [helper, *helper.parents()][above]
        victim.kill()
        assert gone(helper.pid)
        assert judge(process) == {"starts_a_process": [1.0] * 3}
        *lost, kept = map(int, pids.read_text().split())
        assert all(map(gone, [victim.pid, *lost]))
        assert alive(kept)


def test_a_reward_that_kills_its_process_again_and_again_is_named(start: Any):
    with pytest.raises(
        RewardError, match="the process of the rewards 'kills_itself' was killed from outside"
    ):
        judge(start("broken:kills_itself"))


RANK = """
import sys, time
sys.path.insert(0, {root!r})
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.user_code.rewards import RewardProcess
from prefect_rlhf.rlhf_tasks.system.child_pipes import MOST_OUTPUT_BYTES
from prefect_rlhf.rlhf_tasks.user_code.forms import Answers
config = make_config(dict(type="ppo", models=dict(actor="a"), data=dict(train="d"), total_iterations=1,
    sampling=dict(max_completion_length=4), rewards=[dict(function=f) for f in {functions!r}]))
config = config.model_copy(update={{"rewards": (config.rewards[0].model_copy(update={{"kwargs": {kwargs!r}}}),
    *config.rewards[1:])}})
process = RewardProcess(config)
process.submit(Answers(["p"], ["c"], [[1]], {{}}, ["p"]))
while not process.processes[0].who.startswith("reward 'stuck"): time.sleep(0.01)
print(process.processes[0].pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("how", "stopped"), [(signal.SIGKILL, False), (signal.SIGTERM, False), (signal.SIGKILL, True)]
)
def test_a_helper_in_a_regex_and_what_it_has_started_die_with_their_rank(
    tmp_path: Path, how: signal.Signals, stopped: bool
):
    """The helper holds its interpreter; what a reward before it has started has a session of its own."""
    rewards = ROOT / "tests" / BROKEN
    functions = [f"{rewards}:starts_a_process", f"{rewards}:stuck_in_a_regex"]
    code = RANK.format(root=str(ROOT), functions=functions, kwargs={"pid_file": str(tmp_path / "pids")})
    rank = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    helper = int(rank.stdout.readline())
    (started,) = map(int, (tmp_path / "pids").read_text().split())
    assert alive(helper)
    assert alive(started)
    below = psutil.Process(rank.pid).children(recursive=True)
    assert {helper, started} < {process.pid for process in below}
    if stopped:
        for process in below:
            process.suspend()
    rank.send_signal(how)
    rank.wait(60)
    rank.stdout.close()
    assert all(gone(process.pid) for process in below)


# --- secrets ------------------------------------------------------------------------------------------------

CANARY = "canary-7f3a91"


@pytest.mark.parametrize("kind", ["env", "block"])
def test_a_named_secret_reaches_the_reward_and_no_message(
    start: Any, monkeypatch: Any, capfd: Any, kind: str
):
    monkeypatch.setenv("MY_KEY", CANARY)
    name = {"env": "MY_KEY", "block": "my-key"}[kind]
    process = start("broken:tells_its_key", kwargs={"api_key": {kind: name}}, blocks={"my-key": CANARY})
    with pytest.raises(RewardError) as caught:
        judge(process)
    assert "raised RuntimeError: 401 Unauthorized: *** at" in str(caught.value)
    assert CANARY not in str(caught.value) + caught.value.traceback
    out, err = capfd.readouterr()
    assert "calling with ***" in err
    assert CANARY not in out + err


def test_a_secret_with_a_line_break_behind_it_is_in_no_message(start: Any, monkeypatch: Any, tmp_path: Path):
    """A file's last line break is often read with it, and libraries show such a value as `repr` does."""
    monkeypatch.setenv("MY_KEY", f"{CANARY}\n")
    source = "def f(completions, key, **columns):\n    raise ValueError(f'Invalid header value {key.encode()!r}')\n"
    (tmp_path / "mine.py").write_text(source)
    reward = {"function": f"{tmp_path / 'mine.py'}:f", "kwargs": {"key": {"env": "MY_KEY"}}}
    with pytest.raises(RewardError, match=r"Invalid header value b'\*\*\*") as caught:
        judge(start(rewards=[reward]))
    assert CANARY not in str(caught.value) + caught.value.traceback


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        (
            {"env": "NOT_SET_ANYWHERE"},
            "name the environment variable 'NOT_SET_ANYWHERE' for api_key, which is not set",
        ),
        ({"block": "nowhere"}, "name the Prefect Secret block 'nowhere' for api_key, which is not set"),
    ],
)
def test_a_secret_that_is_not_there_is_named(start: Any, named: dict, sentence: str):
    with pytest.raises(RewardError, match=sentence):
        judge(start("broken:tells_its_key", kwargs={"api_key": named}))


def test_prefects_login_is_in_no_environment_of_a_reward(start: Any, monkeypatch: Any):
    for name in ("PREFECT_API_AUTH_STRING", "PREFECT_API_KEY", "PREFECT_SERVER_API_AUTH_STRING"):
        monkeypatch.setenv(name, CANARY)
    process = start("broken:looks_for", kwargs={"text": CANARY})
    assert judge(process) == {"looks_for": [0.0] * 3}
    helper = psutil.Process(pid_of(process))
    for each in (helper, *helper.parents()[:1]):
        assert CANARY not in "".join(each.environ().values())


# --- output -------------------------------------------------------------------------------------------------

PRINTS = """
import os

def prints(completions, **columns):
    for _ in range(100):
        os.write(2, b"x" * 99_999 + b"\\n")
    print("\\x1b[2J not seen")
    return [1.0] * len(completions)

def quotes(completions, **columns):
    print("said \\x1b[2J")
    raise ValueError("\\x1b]0;title\\x07 \\x9b2J \\u202e \\ud800")
"""


def test_a_reward_that_prints_without_end_is_cut_and_the_run_goes_on(start: Any, tmp_path: Path, capfd: Any):
    (tmp_path / "prints.py").write_text(PRINTS)
    rewards = [{"function": f"{tmp_path}/prints.py:prints"}]
    process = start(rewards=rewards)
    assert judge(process) == {"prints": [1.0] * len(SUMS)}
    process.close()
    err = capfd.readouterr().err
    assert len(err) < MOST_OUTPUT_BYTES + 1000
    assert err.count("the process of the rewards 'prints' has printed 1,048,576 bytes. What else") == 1


def test_what_a_reward_prints_or_raises_gives_no_orders_to_the_terminal(
    start: Any, tmp_path: Path, capfd: Any
):
    (tmp_path / "prints.py").write_text(PRINTS)
    for skips in ("stop", "skip"):
        process = start(rewards=[{"function": f"{tmp_path}/prints.py:quotes"}], on_reward_error=skips)
        if skips == "stop":
            with pytest.raises(RewardError, match=r"\\x1b\]0;title\\x07 \\x9b2J \\u202e \\ud800") as caught:
                judge(process)
            assert not {"\x1b", "\x9b", "\u202e"} & set(str(caught.value) + caught.value.traceback)
        else:
            faults = process.submit(SUMS).result(timeout=110).faults
            assert all(r"\x1b]0;title\x07" in fault.reason for fault in faults.values())
            assert len(faults) == len(SUMS)
    err = capfd.readouterr().err
    assert r"said \x1b[2J" in err
    assert "\x1b" not in err
