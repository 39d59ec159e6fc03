"""What commands print of others' texts."""

import io

from flows.cli import run_command
from flows.view.consoles import Console


def test_a_console_prints_markup_but_no_orders_of_others():
    out = io.StringIO()
    Console(file=out, force_terminal=True, highlight=False).print("[bold]failed:[/] \x1b]0;x\x07 \u202e")
    assert out.getvalue() == "\x1b[1mfailed:\x1b[0m \\x1b]0;x\\x07 \\u202e\n"


def test_a_refusal_that_quotes_a_file_name_has_no_escapes(tmp_path, capsys):
    assert run_command(["run", "ppo", "--config", str(tmp_path / "a\x1b[2J\x9bm.yaml")]) == 2
    assert "\x1b[2J" not in (said := capsys.readouterr().err)
    assert r"a\x1b[2J\x9bm.yaml" in said.replace("\n", "")
