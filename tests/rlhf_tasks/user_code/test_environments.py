"""The helper process of environments: answers in any order of arrival, every way in which one can fail."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import pytest

from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.user_code.environments import MOST_KILLED, EnvironmentProcess, longest_play_s
from prefect_rlhf.rlhf_tasks.user_code.episodes import Answer, Episode, FailedAnswer
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError
from prefect_rlhf.rlhf_tasks.user_code.process import ENDING_S, MOST_LOST

pytestmark = pytest.mark.cluster

CODE = '''
import asyncio, os, threading, time
from pathlib import Path

class Room:
    """Answers with the number of the turn. Sample 0 waits until so many lines are in the log."""

    def __init__(self, lines=0, log=None):
        self.lines, self.log = lines, log

    def reset(self, row, seed):
        self.row, self.seed, self.turns = row, seed, 0

    async def step(self, text):
        self.turns += 1
        while self.row["n"] == 0 and self.lines > len(Path(self.log).read_text().split("\\n")) - 1:
            await asyncio.sleep(0.01)
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{self.row['n']} {text}\\n")
        return f"{text}:{self.turns}:{self.seed}", self.row["n"] / 2, text == "end"

class Failing:
    def __init__(self, how):
        self.how = how

    def reset(self, row, seed):
        self.n = row["n"]
        return "begin" if self.how == "begins" else None

    def step(self, text):
        if self.n != 1:
            return "on", 0, False
        return getattr(self, self.how)()

    def raises(self):
        raise KeyError("no such door")

    def leaves(self):
        os._exit(3)

    def hangs(self):
        while True:
            time.sleep(0.01)

    def none(self):
        return None

    def two(self):
        return "on", 1.0

    def number(self):
        return 7, 1.0, False

    def infinite(self):
        return "on", float("inf"), False

    def words(self):
        return "on", "much", False

    def unclear(self):
        return "on", 1.0, "no"

class Waiting(Failing):
    async def step(self, text):
        if self.n == 1:
            await asyncio.sleep(1000)
        if self.n == 2 and self.how == "raises":
            await asyncio.sleep(0.1)
            self.raises()
        return "on", 0, False

class Fragile:
    """Ends its process for the first samples, as many as it is told, in one of its turns or one after the other;
    another is always a little late."""

    def __init__(self, lost=0, slow_s=0.0, turn=1, each_turn=False):
        self.lost, self.slow_s, self.turn, self.each_turn = lost, slow_s, turn, each_turn

    def reset(self, row, seed):
        self.n, self.turns = row["n"], 0

    def step(self, text):
        self.turns += 1
        if self.n < self.lost and self.turns == (self.n + 1 if self.each_turn else self.turn):
            os._exit(4)
        time.sleep(self.slow_s)
        return f"turn {self.turns}", 0, False

class Together:
    """All its steps wait at the same time. Then that of sample 1 ends the process, in one of its turns: each time, or
    until it has left a file."""

    def __init__(self, turn=1, marker=None):
        self.turn, self.marker = turn, marker

    def reset(self, row, seed):
        self.n, self.turns = row["n"], 0

    async def step(self, text):
        self.turns += 1
        await asyncio.sleep(0.1 if self.n == 1 else 0.2)
        if self.n == 1 and self.turns == self.turn and not (self.marker and os.path.exists(self.marker)):
            if self.marker:
                open(self.marker, "w").close()
            os._exit(6)
        return f"turn {self.turns}", 0, False

class Slower:
    """A step takes its seconds once the file is there."""

    def __init__(self, file, slow_s):
        self.file, self.slow_s = file, slow_s

    def reset(self, row, seed):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        if os.path.exists(self.file):
            time.sleep(self.slow_s)
        return f"turn {self.turns}", 0, False

class Logged:
    """Sample 3 ends the process."""

    def __init__(self, log):
        self.log = log

    def reset(self, row, seed):
        self.n = row["n"]

    def step(self, text):
        with open(self.log, "a") as file:
            file.write(f"{self.n} ")
        if self.n == 3:
            os._exit(4)
        return "on", 0, False

class Later:
    """Ends its process when it has answered, once."""

    def __init__(self, mark):
        self.mark = mark

    def reset(self, row, seed):
        pass

    def step(self, text):
        if not os.path.exists(self.mark):
            Path(self.mark).touch()
            threading.Timer(0.2, os._exit, (1,)).start()
        return "on", 0, False

class Gated:
    """Answers a turn when its file is there."""

    def __init__(self, folder):
        self.folder = folder

    def reset(self, row, seed):
        self.n, self.turns = row["n"], 0

    async def step(self, text):
        self.turns += 1
        while not os.path.exists(f"{self.folder}/{self.n}-{self.turns}"):
            await asyncio.sleep(0.01)
        return "on", 0, False

class Counted:
    """Says how many there are."""

    alive = 0

    def __init__(self):
        Counted.alive += 1

    def __del__(self):
        Counted.alive -= 1

    def reset(self, row, seed):
        pass

    def step(self, text):
        return str(Counted.alive), 0, False

class Mute:
    def reset(self, row, seed):
        pass

def silent():
    return Mute()

numbers = [1]

class Locked:
    def __init__(self, key):
        self.key = key

    def reset(self, row, seed):
        pass

    def step(self, text):
        print("tried", self.key, flush=True)
        raise KeyError(f"the door does not open with {self.key}")
'''


def config_of(factory: str, processes: int, timeout_s: float, skips: bool, **kwargs: Any) -> Any:
    return make_config(
        {
            "type": "rollout",
            "models": {"actor": "a"},
            "data": {"train": "d"},
            "sampling": {"max_completion_length": 4},
            "reward_processes": processes,
            "reward_timeout_s": timeout_s,
            "on_reward_error": "skip" if skips else "stop",
            "environment": {
                "factory": factory,
                "kwargs": kwargs,
                "max_turns": 3,
            },
        }
    )


@pytest.fixture
def start(tmp_path) -> Iterator[Any]:
    """Start the process of environments, named in `rooms.py`."""
    (tmp_path / "rooms.py").write_text(CODE)
    (tmp_path / "unsound.py").write_text("import a_module_that_is_not_there\n")
    started: list[EnvironmentProcess] = []

    def make(
        name: str, processes: int = 1, timeout_s: float = 100.0, skips=False, blocks=None, **kwargs: Any
    ) -> EnvironmentProcess:
        factory = name if ":" in name else f"{tmp_path}/rooms.py:{name}"
        config = config_of(factory, processes, timeout_s, skips, **kwargs)
        started.append(EnvironmentProcess(config, blocks))
        return started[-1]

    yield make
    for process in started:
        process.close()


def episodes(*texts: str, samples=(0, 1, 2, 3)) -> list[Episode]:
    return [Episode(n, {"n": n}, 100 + n, texts) for n in samples]


@pytest.mark.parametrize("processes", [1, 3])
def test_answers_come_in_the_order_of_the_samples_whichever_is_first(start, tmp_path, processes):
    log = tmp_path / "log"
    log.touch()
    process = start("Room", processes, lines=3, log=str(log))
    assert process.answers(episodes("a")) == [Answer(f"a:1:{100 + n}", n / 2, False) for n in range(4)]
    assert log.read_text().split("\n")[3] == "0 a", "the first sample was answered last"
    found = process.answers(episodes("a", "end", samples=(0, 2)))
    assert found == [Answer(f"end:2:{100 + n}", n / 2, True) for n in (0, 2)]
    assert process.answers(episodes("b"))[0] == Answer("b:1:100", 0.0, False), "a new batch starts again"


def test_an_episode_goes_on_while_another_thinks(start, tmp_path):
    """Sample 0 thinks until sample 1 has said two things."""
    log = tmp_path / "log"
    log.touch()
    process = start("Room", lines=2, log=str(log))
    process.begin()
    for episode in episodes("a", samples=(0, 1)):
        process.submit(episode)
    assert process.answered(60.0) == {1: Answer("a:1:101", 0.5, False)}
    process.submit(*episodes("a", "b", samples=(1,)))
    found = process.answered(60.0)
    while len(found) < 2:
        found |= process.answered(60.0)
    assert found == {1: Answer("b:2:101", 0.5, False), 0: Answer("a:1:100", 0.0, False)}


def test_each_episode_has_a_deadline_of_its_own(start):
    process, texts, late = start("Waiting", how="hangs", timeout_s=3.0, skips=True), ["a"], False
    process.begin()
    for episode in episodes("a", samples=(0, 1)):
        process.submit(episode)
    while not late:
        for sample, answer in process.answered(60.0).items():
            late |= sample == 1 and "step gave no answer in 3 s" in answer.reason
            if sample == 0:
                assert answer == ON
                time.sleep(0.2)
                texts.append("a")
                process.submit(*episodes(*texts, samples=(0,)))
    assert len(texts) > 5
    assert process.answered(60.0) == {0: ON}, "which was asked last, and is not late"


def test_an_episode_that_asked_nothing_when_the_process_was_lost_is_played_again_when_it_does(
    start, tmp_path
):
    log = tmp_path / "log"
    process = start("Room", log=str(log))
    process.answers(episodes("a", samples=(1, 2)))
    kill()
    assert process.answers(episodes("a", "b", samples=(1,))) == [Answer("b:2:101", 0.5, False)]
    assert process.answers(episodes("a", "c", samples=(2,))) == [Answer("c:2:102", 1.0, False)]
    assert log.read_text().split("\n")[2:-1] == ["1 a", "1 b", "2 a", "2 c"]


def test_a_process_that_is_killed_from_outside_is_given_all_turns_again(start, tmp_path):
    log = tmp_path / "log"
    process = start("Room", log=str(log))
    process.answers(episodes("a", samples=(1,)))
    kill()
    assert process.answers(episodes("a", "b", samples=(1,))) == [Answer("b:2:101", 0.5, False)]
    assert log.read_text().split() == ["1", "a", "1", "a", "1", "b"]


def kill() -> None:
    """Kill the only helper process, as the system does when memory runs out."""
    [keeper] = [child for child in psutil.Process().children() if "episodes" in " ".join(child.cmdline())]
    os.kill(keeper.children(recursive=True)[-1].pid, signal.SIGKILL)


def test_an_answer_is_taken_before_the_next_episode_ends_the_process(start, tmp_path):
    process = start("Logged", skips=True, log=str(tmp_path / "log"))
    assert process.answers(episodes("a"))[:3] == [ON] * 3
    assert sorted((tmp_path / "log").read_text().split()) == ["0", "1", "2", "3"], "none is played again"


def test_a_process_that_ends_between_two_batches_costs_nothing(start, tmp_path):
    process = start("Later", mark=str(tmp_path / "mark"))
    process.answers(episodes("a", samples=(0,)))
    [helper] = [child for child in psutil.Process().children() if "episodes" in " ".join(child.cmdline())]
    psutil.wait_procs(helper.children(recursive=True), timeout=60)
    assert process.answers(episodes("a", samples=(1, 2, 3))) == [ON] * 3


def test_a_replay_is_over_when_each_has_been_answered_though_some_have_asked_again(start, tmp_path):
    """So a second process may be killed."""
    process = start("Gated", folder=str(tmp_path))
    process.begin()
    for episode in episodes("a", samples=(0, 1)):
        process.submit(episode)
    assert process.answered(1.0) == {}
    kill()
    (tmp_path / "1-1").touch()
    assert process.answered(60.0) == {1: ON}
    process.submit(*episodes("a", "b", samples=(1,)))
    (tmp_path / "0-1").touch()
    assert process.answered(60.0) == {0: ON}
    kill()
    (tmp_path / "1-2").touch()
    assert process.answered(60.0) == {1: ON}


@pytest.mark.whole
def test_each_turn_that_is_played_again_has_the_time_of_a_turn(start, tmp_path):
    slow = tmp_path / "slow"
    process = start("Slower", timeout_s=4.0, file=str(slow), slow_s=1.6)
    texts = ("a", "b", "c")
    for n in (1, 2):
        process.answers(episodes(*texts[:n], samples=(1,)))
    slow.touch()
    kill()
    assert process.answers(episodes(*texts, samples=(1,))) == [Answer("turn 3", 0.0, False)]


def test_an_evaluations_environment_answers_no_episode_of_the_same_number(start, tmp_path):
    """Samples of an evaluation are numbered from 0, as those that wait for the next iteration may be."""
    process = start("Room")

    def answer(texts: list[str], seed: int, said: Sequence[int] = ()) -> Answer:
        process.submit(Episode(3, {"n": 3}, seed, texts, said))
        return process.answered(20.0)[3]

    process.begin()
    first = answer(["a"], 103)
    process.begin()
    answer(["of an evaluation"], 7)
    process.begin([3])
    assert answer(["a", "b"], 103, [first.digest]).observation == "b:2:103"


def test_environments_that_no_turn_comes_to_any_more_are_let_go_as_a_new_batch_begins(start):
    process = start("Counted")
    assert process.answers(episodes("a"))[-1].observation == "4"
    assert process.answers(episodes("b", samples=(7,))) == [Answer("1", 0.0, False)]


SENTENCES = {
    "raises": ("step raised KeyError: 'no such door' at {file}:37.", 1),
    "leaves": ("step ended its process with exit status 3.", 1),
    "none": ("step returned None. Return (observation, reward, done).", 1),
    "two": ("step returned ('on', 1.0). Return (observation, reward, done).", 1),
    "number": ("step returned the observation 7: not a text.", 1),
    "infinite": ("step returned the reward inf: not a finite number.", 1),
    "words": ("step returned the reward 'much': not a finite number.", 1),
    "unclear": ("step returned done='no': neither True nor False.", 1),
    "begins": ("reset returned 'begin'. What the policy reads first is the row's prompt: return nothing.", 0),
}


@pytest.mark.parametrize("how", SENTENCES)
def test_an_environment_that_fails_is_named_with_its_sample(start, tmp_path, how):
    sentence, sample = SENTENCES[how]
    file = tmp_path / "rooms.py"
    with pytest.raises(RewardError) as caught:
        start("Failing", how=how).answers(episodes("a"))
    assert str(caught.value) == f"environment {file}:Failing: {sentence.format(file=file)}"
    assert caught.value.place == sample


@pytest.mark.parametrize("name", ["Failing", pytest.param("Waiting", marks=pytest.mark.whole)])
def test_an_environment_that_never_answers_is_named_with_the_line_where_it_is(start, tmp_path, name):
    with pytest.raises(RewardError) as caught:
        start(name, timeout_s=3.0, how="hangs").answers(episodes("a"))
    line = CODE[: CODE.index("time.sleep" if name == "Failing" else "asyncio.sleep(1000)")].count("\n") + 1
    assert str(caught.value) == (
        f"environment {tmp_path}/rooms.py:{name}: step gave no answer in 3 s at {tmp_path}/rooms.py:{line}. "
        "Correct it or raise reward_timeout_s."
    )
    assert caught.value.place == 1


def test_an_environment_that_fails_ends_the_wait_for_the_others(start):
    with pytest.raises(RewardError, match="step raised KeyError: 'no such door'") as caught:
        start("Waiting", timeout_s=500.0, how="raises").answers(episodes("a"))
    assert caught.value.place == 2


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Hall", "has no 'Hall'. Name a class or a function."),
        ("numbers", "'numbers' is neither a class nor a function."),
        ("silent", "Mute has no method 'step'. Give it reset(row, seed) and step(text)."),
        ("Failing", "making it raised TypeError"),
        (
            "unsound",
            "importing it raised ModuleNotFoundError: No module named 'a_module_that_is_not_there' at",
        ),
    ],
)
def test_what_is_no_environment_is_named(start, tmp_path, name, sentence):
    factory = f"{tmp_path}/unsound.py:Room" if name == "unsound" else name
    with pytest.raises(RewardError, match="environment") as caught:
        start(factory).answers(episodes("a"))
    assert sentence in str(caught.value)


ON = Answer("on", 0.0, False)


@pytest.mark.parametrize("how", SENTENCES)
def test_where_failed_samples_are_skipped_the_others_have_their_answers(start, tmp_path, how):
    sentence, sample = SENTENCES[how]
    file = tmp_path / "rooms.py"
    process = start("Failing", how=how, skips=True)
    found = process.answers(episodes("a"))
    failed = FailedAnswer(f"environment {file}:Failing: {sentence.format(file=file)}")
    if how == "begins":  # which it does for every sample
        assert found == 4 * [failed]
    else:
        assert found == [failed if n == sample else ON for n in range(4)]
        assert process.answers(episodes("a", "b", samples=(0, 2, 3))) == 3 * [ON]


@pytest.mark.parametrize("name", [pytest.param("Failing", marks=pytest.mark.whole), "Waiting"])
def test_so_they_have_where_it_never_answers_one_sample(start, name):
    found = start(name, timeout_s=3.0, how="hangs", skips=True).answers(episodes("a"))
    assert [found[0], *found[2:]] == 3 * [ON]
    assert "step gave no answer in 3 s at" in found[1].reason


@pytest.mark.parametrize("turn", [1, pytest.param(3, marks=pytest.mark.whole)])
def test_where_several_wait_for_their_answers_the_one_over_which_the_process_is_lost_is_found(start, turn):
    texts, sentence = ("a", "b", "c"), "step ended its process with exit status 6."
    skips, stops = start("Together", skips=True, turn=turn), start("Together", turn=turn)
    for n in range(1, turn):
        on = 4 * [Answer(f"turn {n}", 0.0, False)]
        assert skips.answers(episodes(*texts[:n])) == stops.answers(episodes(*texts[:n])) == on
    found = skips.answers(episodes(*texts[:turn]))
    assert [found[0], *found[2:]] == 3 * [Answer(f"turn {turn}", 0.0, False)]
    assert sentence in found[1].reason
    others = episodes(*texts[:turn], "d", samples=(0, 2, 3))
    assert skips.answers(others) == 3 * [Answer(f"turn {turn + 1}", 0.0, False)]
    with pytest.raises(RewardError, match=sentence) as caught:
        stops.answers(episodes(*texts[:turn]))
    assert caught.value.place == 1


@pytest.mark.whole
def test_a_loss_that_no_episode_repeats_alone_ends_the_run_without_naming_one(start, tmp_path):
    for number, skips in enumerate((False, True)):
        process = start("Together", skips=skips, marker=str(tmp_path / f"left-{number}"))
        with pytest.raises(RewardError, match="step ended its process with exit status 6") as caught:
            process.answers(episodes("a"))
        assert caught.value.place is None


@pytest.mark.parametrize("turn", [pytest.param(1, marks=pytest.mark.whole), 2])
def test_a_process_lost_over_a_sample_is_begun_anew_with_the_turns_of_the_others(start, turn):
    process, texts = start("Fragile", lost=2, turn=turn, skips=True), ("a", "b")[:turn]
    for n in range(1, turn):
        assert process.answers(episodes(*texts[:n])) == 4 * [Answer("turn 1", 0.0, False)]
    found = process.answers(episodes(*texts))
    assert found[2:] == 2 * [Answer(f"turn {turn}", 0.0, False)]
    assert [each.reason.partition("step ")[2] for each in found[:2]] == 2 * [
        "ended its process with exit status 4."
    ]


def test_one_that_is_lost_in_a_later_turn_ends_a_run_that_skips_nothing(start):
    process = start("Fragile", lost=2, turn=2)
    process.answers(episodes("a"))
    with pytest.raises(RewardError, match="ended its process with exit status 4") as caught:
        process.answers(episodes("a", "b"))
    assert caught.value.place == 0


@pytest.mark.whole
def test_as_many_samples_of_a_batch_may_cost_a_process_in_all_its_turns_together(start):
    process = start("Fragile", skips=True, lost=MOST_LOST + 1, each_turn=True)
    everyone = tuple(range(MOST_LOST + 2))
    for n in range(MOST_LOST):
        found = process.answers(episodes(*"abcdef"[: n + 1], samples=everyone[n:]))
        assert [isinstance(each, FailedAnswer) for each in found] == [True, *[False] * (len(found) - 1)]
    with pytest.raises(RewardError, match="ended its process with exit status 4"):
        process.answers(episodes(*"abcdef"[: MOST_LOST + 1], samples=everyone[MOST_LOST:]))


def test_what_is_played_again_takes_no_longer_than_the_deadline_allows(start, monkeypatch):
    monkeypatch.setattr("prefect_rlhf.rlhf_tasks.user_code.environments.MOST_KILLED", 0)
    process = start("Room")
    process.answers(episodes("a", samples=(1,)))
    kill()
    with pytest.raises(
        RewardError, match=r"was killed from outside.* Its batch cannot be played again in 0 s"
    ):
        process.answers(episodes("a", "b", samples=(1,)))


@pytest.mark.whole
def test_what_is_no_samples_own_fault_is_not_skipped(start):
    samples = tuple(range(MOST_LOST + 2))
    for name, sentence, kwargs in (
        ("Failing", "making it raised TypeError", {}),
        ("silent", "Mute has no method 'step'", {}),
        ("Fragile", "ended its process with exit status 4", {"lost": MOST_LOST + 1}),
        ("Fragile", "step gave no answer in 3 s", {"slow_s": 1.0, "timeout_s": 3.0}),
    ):
        with pytest.raises(RewardError, match=sentence):
            start(name, skips=True, **kwargs).answers(episodes("a", samples=samples))


def test_the_deadline_allows_for_every_turn_and_for_what_is_played_again():
    for skips, times in ((False, 1 + MOST_KILLED), (True, 1 + MOST_LOST)):
        config = config_of("builtin:GuessingGame", 1, 7.0, skips)
        assert longest_play_s(config) == 3 * times * (7.0 + ENDING_S)
        assert longest_play_s(config.model_copy(update={"environment": None})) == 0


@pytest.mark.parametrize("named", [{"env": "MY_KEY"}, {"block": "my-key"}])
def test_a_named_secret_reaches_the_environment_and_no_message(start, monkeypatch, capfd, named):
    monkeypatch.setenv("MY_KEY", "canary-31")
    for skips in (False, True):
        process = start("Locked", skips=skips, blocks={"my-key": "canary-31"}, key=named)
        if skips:
            (failed,) = process.answers(episodes("a", samples=(1,)))
            assert "the door does not open with ***" in failed.reason
            continue
        with pytest.raises(RewardError, match=r"the door does not open with \*\*\*") as caught:
            process.answers(episodes("a", samples=(1,)))
        assert "canary-31" not in caught.value.traceback
    out, err = capfd.readouterr()
    assert "tried ***" in out + err
    assert "canary-31" not in out + err
    with pytest.raises(RewardError, match="'NOWHERE' for key, which is not set here"):
        start("Locked", key={next(iter(named)): "NOWHERE"}).answers(episodes("a", samples=(1,)))
