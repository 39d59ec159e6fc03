"""What a child prints is passed on printable and up to a bound."""

import subprocess
import sys
from pathlib import Path

from prefect_rlhf.rlhf_tasks.system.child_pipes import MOST_OUTPUT_BYTES, ChildOutput

PRINTS = "import sys; sys.stderr.buffer.write({!r})"


def printed(code: str, log: Path | None = None) -> None:
    output = ChildOutput("the process of mine", log)
    with output as pipe:
        child = subprocess.Popen([sys.executable, "-c", code], stderr=pipe)
    assert child.wait(60) == 0
    output.close()


def test_orders_to_a_terminal_are_shown(capfd):
    printed(PRINTS.format("10%\r20%\x1b[2J\u202e é\n".encode() + b"\xff"))
    assert capfd.readouterr().err == "10%\n20%\\x1b[2J\\u202e é\n\\xff"


def test_a_child_that_prints_without_end_ends_and_is_cut_with_a_line(tmp_path, capfd):
    printed("import sys\nfor _ in range(200): sys.stderr.write('x' * 99_999 + chr(10))", tmp_path / "log")
    log = (tmp_path / "log").read_text()
    assert MOST_OUTPUT_BYTES < len(log) < MOST_OUTPUT_BYTES + 200
    assert log.endswith(
        "\nthe process of mine has printed 1,048,576 bytes. What else it prints is dropped.\n"
    )
    assert capfd.readouterr().err == ""
    printed(PRINTS.format(b"again"), tmp_path / "log")
    assert (tmp_path / "log").read_text() == f"{log}again"


def test_a_log_that_is_a_link_is_not_written_to(tmp_path):
    (tmp_path / "log").symlink_to(tmp_path / "other")
    try:
        ChildOutput("mine", tmp_path / "log")
    except OSError:
        assert not (tmp_path / "other").exists()
    else:
        raise AssertionError("a link was opened")
