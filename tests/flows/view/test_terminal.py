"""What a run shows in the terminal: phases, a bar with the ranks' own seconds, plain lines where there is none."""

import io
from io import StringIO

import pytest

from prefect_rlhf.flows.cli import run_command
from prefect_rlhf.flows.view import terminal
from prefect_rlhf.flows.view.terminal import Console, RunProgress, as_time, phase, shown_metrics

METRICS = {
    "iteration": 3,
    "loss/value": 0.25,
    "kl": 0.5,
    "rewards/brevity/mean": 2.0,
    "rewards/brevity/std": 1.0,
    "rewards/margins": 0.5,
    "reward": 3.0,
    "accuracy": None,
    "time/iteration": 1.25,
}


@pytest.fixture
def shown(monkeypatch):
    """shown(is_terminal): what is printed from then on, as text."""

    def make(is_terminal: bool) -> StringIO:
        file = StringIO()
        monkeypatch.setattr(terminal, "console", Console(file=file, force_terminal=is_terminal, width=120))
        return file

    return make


def test_every_reward_of_the_run_is_shown_by_its_own_name():
    assert shown_metrics(METRICS) == ["reward", "rewards/brevity/mean", "rewards/margins", "kl", "loss/value"]


def test_plain_lines_say_phases_seconds_of_the_ranks_and_what_is_left(shown):
    file, lines = shown(False), []
    with phase("Prefect server"):
        pass
    progress = RunProgress("mine", 5, lines.append)
    progress.begin_phase("models")
    progress.begin_phase("first iteration")
    progress.iteration_ended(3, 1.25, METRICS)
    progress.committed(4)
    progress.iteration_ended(3, 1.75, METRICS)
    progress.begin_phase("model and summary")
    progress.close()
    assert file.getvalue().splitlines() == ["Prefect server ...", "Prefect server: 0.0 s"]
    figures = "reward 3.000, rewards/brevity/mean 2.000, rewards/margins 0.500, kl 0.500, loss/value 0.250"
    assert lines == [
        "models ...",
        "models: 0.0 s",
        "first iteration ...",
        "first iteration: 0.0 s",
        f"iteration 4 of 5, 1.25 s, 0:00:01 left, {figures}",
        f"iteration 4 of 5 again, 1.75 s, 0:00:02 left, {figures}",
        "model and summary ...",
    ]


def test_a_terminal_has_a_bar_that_goes_when_the_run_ends(shown):
    file = shown(True)
    progress = RunProgress("mine", 5, terminal.tell)
    progress.begin_phase("models")
    progress.iteration_ended(3, 1.25, METRICS)
    progress.committed(4)
    progress._bar.refresh()
    progress.close()
    text = file.getvalue()
    bar = text[text.rindex("mine") :]
    assert [word in bar for word in ("4/5", "1.25 s/iteration", "0:00:01 left", "4 committed")] == [True] * 4
    assert "iteration 4 of 5, 1.25 s, reward 3.000" in text
    assert text.endswith("\x1b[2K"), "the bar is wiped"
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is back"


def test_a_phase_that_fails_leaves_no_line_of_its_end(shown):
    file = shown(False)
    with pytest.raises(OSError, match="no"), phase("cluster"):
        raise OSError("no")
    assert file.getvalue() == "cluster ...\n"


@pytest.mark.parametrize(("seconds", "text"), [(-3, "0:00:00"), (65.4, "0:01:05"), (90000, "1 day, 1:00:00")])
def test_time_is_told_in_hours_minutes_and_seconds(seconds, text):
    assert as_time(seconds) == text


def test_a_console_prints_markup_but_no_orders_of_others():
    out = io.StringIO()
    Console(file=out, force_terminal=True, highlight=False).print("[bold]failed:[/] \x1b]0;x\x07 \u202e")
    assert out.getvalue() == "\x1b[1mfailed:\x1b[0m \\x1b]0;x\\x07 \\u202e\n"


def test_a_refusal_that_quotes_a_file_name_has_no_escapes(tmp_path, capsys):
    assert run_command(["run", "ppo", "--config", str(tmp_path / "a\x1b[2J\x9bm.yaml")]) == 2
    assert "\x1b[2J" not in (said := capsys.readouterr().err)
    assert r"a\x1b[2J\x9bm.yaml" in said.replace("\n", "")
