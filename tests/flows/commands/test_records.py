"""`prefect-rlhf runs list` and `runs compare`."""

import json
import subprocess
import sys

from tests.flows.run_folders import write_run


def test_runs_are_listed_in_a_table(call, document, tmp_path):
    write_run({**document, "name": "mine"}, [0.25, 0.5])
    status, out, err = call("runs", "list", str(tmp_path / "runs"))
    assert status == 0, err
    (row,) = (line.split() for line in out.splitlines() if line.startswith("mine"))
    assert row[1] == "ppo"
    assert row[3:7] == ["2/2", "finished", "reward", "0.5"]
    assert row[-1] == "0:00:05"


def test_a_damaged_run_is_listed_with_what_is_wrong(call, document, tmp_path):
    (write_run({**document, "name": "mine"}, [0.25]) / "metrics.jsonl").write_text("7\n")
    status, out, err = call("runs", "list", str(tmp_path / "runs"))
    assert (status, err) == (0, "")
    assert "damaged  metrics.jsonl:1: is no row of metrics: 7" in out


def test_a_folder_without_runs_says_so_and_one_that_is_not_there_is_refused(call, tmp_path):
    assert call("runs", "list", str(tmp_path)) == (0, f"{tmp_path} has no runs yet.\n", "")
    status, _, err = call("runs", "list", str(tmp_path / "gone"))
    assert status == 2
    assert "gone: no such folder. Name the folder of your runs" in err


def test_runs_are_compared_in_tables_and_as_json(call, document, tmp_path):
    one = write_run({**document, "name": "one"}, [0.25, 0.5])
    other = write_run({**document, "name": "other", "kl_coef": 0.2}, [0.25, 0.75])
    status, out, err = call("runs", "compare", str(one), str(other))
    assert status == 0, err
    rows = [line.split() for line in out.splitlines()]
    assert ["kl_coef", "0.05", "0.2"] in rows
    assert ["reward", "0.5", "0.75"] in rows
    assert not any(row[:1] == ["batch_size"] for row in rows)
    status, out, _ = call("runs", "compare", str(one), str(other), "--json")
    assert json.loads(out)["settings"] == {"kl_coef": [0.05, 0.2]}


def test_a_run_is_compared_with_others_only(call, document):
    one = str(write_run({**document, "name": "one"}, [0.25]))
    status, _, err = call("runs", "compare", one, one)
    assert (status, "is named twice. Name different runs." in err) == (2, True)


def test_a_page_of_a_comparison_is_not_written_over_a_folder(call, document, tmp_path):
    one, other = (str(write_run({**document, "name": name}, [0.25])) for name in ("one", "other"))
    (tmp_path / "pages").mkdir()
    status, _, err = call("runs", "compare", one, other, "--html", str(tmp_path / "pages"))
    assert (status, "pages is a folder. Name a file in it" in err) == (2, True), err
    assert not list(tmp_path.glob(".pages*"))


def test_to_list_runs_loads_neither_torch_nor_prefect(tmp_path):
    code = (
        "import sys; from prefect_rlhf.flows.cli import run_command; run_command(sys.argv[1:]); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'prefect', 'transformers')))"
    )
    command = [sys.executable, "-c", code, "runs", "list", str(tmp_path)]
    assert subprocess.run(command, check=False, timeout=120).returncode == 0
