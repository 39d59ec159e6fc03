"""The report of a run has what its folder has, and nothing of it becomes markup."""

import json
import os
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from prefect_rlhf.flows.cli import run_command
from prefect_rlhf.flows.run import reporting
from prefect_rlhf.flows.run.reporting import contents_of, keep_stages, leave_report, newest_part, write_report
from prefect_rlhf.flows.view.clocks import running_s
from prefect_rlhf.rlhf_tasks.checkpoint.changes import Accepted, write_accepted
from prefect_rlhf.rlhf_tasks.checkpoint.journals import EMPTY, JOURNALS
from prefect_rlhf.rlhf_tasks.data.hub import Pin, pins_document
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan
from tests.flows.reported_run import RECORDED, later, recorded_run, write_rows, write_run, write_samples

HOSTILE = (
    '</pre><script>alert(1)</script><img src=http://picture.invalid/x.png onerror="alert(2)">\x1b[31m & <b>'
)


class Tags(HTMLParser):
    """The elements of a page, with their attributes; its text without style and script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._silent = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._silent = tag in ("style", "script")

    def handle_endtag(self, tag):
        self._silent = False

    def handle_data(self, data):
        self.text += "" if self._silent else f"{data}\n"


def page_of(folder: Path) -> Tags:
    return Tags(write_report(folder).read_text(encoding="utf-8"))


def test_the_page_of_a_run_has_all_its_parts(tmp_path):
    page = page_of(recorded_run(tmp_path))
    links = {values["href"] for tag, values in page.tags if tag == "a"}
    anchors = {f"#{values['id']}" for tag, values in page.tags if tag == "section"}
    assert links == anchors == {"#curves", "#time", "#plan", "#samples", "#lineage", "#configuration"}
    for words in (
        "12 of 12",
        "rewards/length_reward/mean",
        "What each rank's time goes to",
        "Iterations 10 to 12",
        "One iteration as it was planned",
        "Planned beside measured",
        "It has finished.",
        "total_iterations: 12",
    ):
        assert words in page.text
    labels = [values.get("aria-label") for tag, values in page.tags if tag == "svg"]
    assert all(labels), "a picture has words for who does not see it"
    assert len(labels) > 10


def pipeline(tmp_path: Path) -> Path:
    """The folder of a pipeline of three stages, two of which have begun; the first was resumed last."""
    first, second = (recorded_run(tmp_path / place) for place in "ab")
    stages = tmp_path / "pipeline"
    keep_stages(stages, ["sft", "then <i>", "score"])
    first.rename(stages / "sft")
    second.rename(stages / "then <i>")
    os.utime(stages / "then <i>" / "config.json", (1, 1))
    return stages


def test_a_pipeline_has_a_page_of_its_stages(tmp_path):
    stages = pipeline(tmp_path)
    assert run_command(["report", str(stages)]) == 0
    page = Tags((stages / "report.html").read_text())
    links = {values["href"] for tag, values in page.tags if tag == "a"}
    assert links == {"#stages", "#stage-1", "#stage-2"}
    assert page.text.index("sft") < page.text.index("then <i>")
    for words in ("A pipeline: sft, then <i>.", "12 of 12", "It has finished.", "More is in sft/report.html"):
        assert words in page.text
    assert ("i", {}) not in page.tags


def test_runs_in_a_folder_are_no_pipeline(tmp_path, capsys):
    stages = pipeline(tmp_path)
    (stages / "stages.json").write_text("{}")
    assert run_command(["report", str(stages)]) == 2
    assert "stages.json: not as a pipeline wrote it" in capsys.readouterr().err
    (stages / "stages.json").write_text('{"stages": ["score"]}')
    assert run_command(["report", str(stages)]) == 2
    assert "no stage of" in capsys.readouterr().err
    (stages / "stages.json").unlink()
    assert run_command(["report", str(stages)]) == 2
    said = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert "is neither a run's folder, which has config.json, nor a pipeline's, which has stages.json" in said


def test_a_report_can_be_sent_it_names_no_other_address_and_runs_only_its_own_script(tmp_path):
    page = page_of(recorded_run(tmp_path))
    for tag, values in page.tags:
        assert not values.keys() & {"src", "style", "onclick", "onload", "srcset", "data"}
        assert values.get("href", "#").startswith("#")
        assert tag not in ("link", "iframe", "object", "img", "base", "form")
    [policy] = [values["content"] for tag, values in page.tags if "http-equiv" in values]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_a_report_has_no_argument_of_a_reward(tmp_path):
    assert "s3cret" not in write_report(recorded_run(tmp_path)).read_text()


def test_foreign_text_stays_text(tmp_path):
    folder = recorded_run(tmp_path)
    sample = {**RECORDED["samples"][0], "prompt": HOSTILE, "completion": HOSTILE}
    sample |= {"rewards": {HOSTILE: 1.0}, "columns": {"answer": HOSTILE}}
    write_samples(folder, 11, [sample])
    write_rows(folder / "metrics.jsonl", [{"iteration": i, f"rewards/{HOSTILE}/mean": i / 2} for i in (0, 1)])
    (folder / "models.json").write_text(json.dumps({HOSTILE: {"model.safetensors": HOSTILE}}))
    page = page_of(folder)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert "img" not in {tag for tag, _ in page.tags}
    assert page.text.count("<script>alert(1)</script>") >= 5
    assert "\x1b" not in unescape(page.text)


def test_a_run_without_a_commit_has_a_page_that_says_so(tmp_path):
    page = page_of(write_run(tmp_path))
    assert "No iteration is committed" in page.text
    assert "It has not finished" in page.text
    assert {values["id"] for tag, values in page.tags if tag == "section"} == {"curves", "configuration"}


def test_a_run_in_progress_has_a_page_of_its_committed_iterations_though_the_next_is_half_written(tmp_path):
    folder = recorded_run(tmp_path)
    (folder / "summary.json").unlink()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 12, "rew')
    page = page_of(folder)
    assert "It has not finished: 12 iterations are committed." in page.text
    assert contents_of(folder).curves["reward"].iterations.tolist() == list(range(1, 13))


def test_calls_have_their_seconds_beside_the_planned_ones(tmp_path):
    contents = contents_of(recorded_run(tmp_path))
    [generate] = [bar for bar in contents.nodes if bar.name == "actor_generate"]
    assert generate.planned_s == RECORDED["planned_and_measured"]["calls"]["actor_generate"]["planned"]
    assert 0.5 < generate.low_s <= generate.median_s <= generate.high_s < 3
    for work in contents.work_s.values():
        assert sum(work.values()) == pytest.approx(running_s(contents.spans)), (
            "the time of each rank is told in whole"
        )


def test_samples_of_a_prompt_that_came_early_and_late_stand_side_by_side(tmp_path):
    folder = recorded_run(tmp_path)
    first, *others = RECORDED["samples"]
    write_samples(folder, 0, [*others, {**first, "prompt": "the same"}])
    write_samples(folder, 11, [{**first, "prompt": "the same", "completion": "better"}, first])
    early, late = contents_of(folder).samples
    assert (early.iteration, late.iteration) == (0, 11)
    assert early.rows[0]["prompt"] == late.rows[0]["prompt"] == "the same"


def test_the_lineage_names_commits_on_the_hub_weights_and_accepted_changes(tmp_path):
    folder, commit = recorded_run(tmp_path), 40 * "a"
    (folder / "revisions.json").write_text(pins_document({"model ORG/tiny": Pin(commit=commit, files=())}))
    place = f"/cache/models--ORG--tiny/snapshots/{commit}"
    (folder / "models.json").write_text(json.dumps({place: {"model.safetensors": 64 * "b"}}))
    journals = dict.fromkeys(JOURNALS, EMPTY)
    write_accepted(
        folder, Accepted(step=4, changes=("optimizer.learning_rate was 1",), config={}, journals=journals)
    )
    page = page_of(folder)
    for words in ("model ORG/tiny", commit, f"ORG/tiny@{commit}", 16 * "b", "optimizer.learning_rate was 1"):
        assert words in page.text


def test_a_huge_run_has_a_page_of_bounded_size(tmp_path, monkeypatch):
    """20,000 iterations; of the lineage the newest megabyte is read."""
    monkeypatch.setattr(reporting, "NEWEST_BYTES", 1 << 20)
    folder, plan = recorded_run(tmp_path), ExecutionPlan.model_validate(RECORDED["plan"])
    metrics = RECORDED["metrics"][0]
    write_rows(
        folder / "metrics.jsonl",
        ({**metrics, "iteration": i, "reward": (i % 977) / 977, "kl": i * 1e-4} for i in range(20_000)),
    )
    once = [row for row in RECORDED["lineage"] if row["iteration"] == 9]
    write_rows(folder / "lineage.jsonl", (later(row, i - 9, 2.5 * i) for i in range(4_000) for row in once))
    file = write_report(folder)
    assert file.stat().st_size < 1_500_000
    part, rows = newest_part(folder)
    assert part is not None
    assert len(rows) % len(plan.nodes) == 0, "iterations are whole"
    assert rows[-1]["iteration"] == 3_999
    assert f"iterations {rows[0]['iteration'] + 1} to 4000" in Tags(file.read_text()).text


def test_the_command_writes_the_page_into_the_run_folder_or_elsewhere(tmp_path, capsys):
    folder = recorded_run(tmp_path)
    assert run_command(["report", str(folder)]) == 0
    assert (folder / "report.html").read_text() == write_report(folder).read_text()
    other = tmp_path / "sent.html"
    assert run_command(["report", str(folder), "--html", str(other)]) == 0
    assert other.exists()
    assert str(other) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["report", "NOTHING"], "is neither a run's folder"),
        (["report", "RUN", "--html", "FOLDER"], "is a folder"),
        (["report", "RUN", "--html", "a.html", "--trace", "b.json"], "two files"),
        (["report", "EMPTY", "--trace", "trace.json"], "no committed iteration"),
        (["report", "RUN", "--html", "/proc/report.html"], "cannot be written to"),
    ],
)
def test_what_cannot_be_written_is_said_in_a_sentence(tmp_path, capsys, arguments, said):
    places = {
        "RUN": recorded_run(tmp_path),
        "EMPTY": write_run(tmp_path, "empty"),
        "FOLDER": tmp_path,
        "NOTHING": tmp_path / "nothing",
    }
    assert run_command([str(places.get(each, each)) for each in arguments]) == 2
    assert said in re.sub(r"\s+", " ", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("metrics.jsonl", '{"iteration": 0, "rew\n'),
        ("metrics.jsonl", '{"iteration": 0, "reward": "high"}\n'),
        ("metrics.jsonl", "{}\n"),
        ("samples/00000000-0000.jsonl", '{"prompt": "2 +\n'),
        ("samples/00000000-0000.jsonl", '{"prompt": 7}\n'),
        ("samples/00000000-0000.jsonl", '{"prompt": "a", "completion": "b", "rewards": [1]}\n'),
        ("lineage.jsonl", "{}\n"),
        ("lineage.jsonl", "7\n"),
        ("lineage.jsonl", '{"iteration": 9, "no\n'),
        ("lineage.jsonl", json.dumps({**RECORDED["lineage"][0], "clocks": {"0": 1}}) + "\n"),
    ],
)
def test_a_damaged_file_of_a_run_is_named_in_a_sentence(tmp_path, capsys, file, line):
    folder = recorded_run(tmp_path)
    (folder / file).write_text(line + (folder / file).read_text())
    commands = [["report", str(folder)]]
    if file == "lineage.jsonl":
        commands.append([*commands[0], "--trace", str(tmp_path / "trace.json")])
    for command in commands:
        assert run_command(command) == 2
        said = re.sub(r"\s+", "", capsys.readouterr().err)
        assert said.startswith("error:")
        assert f"{folder}/{file}" in said
        assert "Traceback" not in said


def test_a_file_beside_the_samples_is_no_samples(tmp_path):
    folder = recorded_run(tmp_path)
    (folder / "samples" / "notes.jsonl").write_text("mine\n")
    assert [some.iteration for some in contents_of(folder).samples] == [0, 11]


def test_runs_that_are_compared_have_a_page_with_their_curves_and_what_differs(tmp_path, capsys):
    first, second = (recorded_run(tmp_path / base, kl_coef=kl) for base, kl in (("a", 0.05), ("b", 0.1)))
    write_samples(second, 11, [{**RECORDED["samples"][0], "completion": HOSTILE}])
    write_rows(second / "metrics.jsonl", [{**row, "only/here": 1.0} for row in RECORDED["metrics"]])
    file = tmp_path / "compared.html"
    assert run_command(["runs", "compare", str(first), str(second), "--html", str(file)]) == 0
    page = Tags(file.read_text())
    for words in ("2 runs compared", "kl_coef", "0.05", "0.1", "Samples of the last iteration", "only/here"):
        assert words in page.text
    reward = next(
        v for tag, v in page.tags if tag == "svg" and (v["aria-label"] or "").startswith("reward over")
    )
    assert reward["data-names"] == "tiny|tiny"
    alone = next(
        v for tag, v in page.tags if tag == "svg" and (v["aria-label"] or "").startswith("only/here")
    )
    assert alone["data-runs"] == "1", "a run keeps its colour where the other lacks a metric"
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert "s3cret" not in file.read_text()


def test_more_runs_than_colours_are_refused(tmp_path, capsys):
    runs = [str(write_run(tmp_path, f"run-{number}")) for number in range(9)]
    assert run_command(["runs", "compare", *runs, "--html", str(tmp_path / "page.html")]) == 2
    assert "9 runs are too many for one page" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_does_not_end_a_run(tmp_path, caplog):
    folder = recorded_run(tmp_path)
    (folder / "samples" / "00000000-0000.jsonl").write_text("not JSON\n")
    leave_report(folder)
    assert "could not be written" in caplog.text


def test_a_report_loads_neither_torch_nor_prefect(tmp_path):
    code = (
        "import sys; from prefect_rlhf.flows.cli import run_command; status = run_command(sys.argv[1:]); "
        "heavy = {'torch', 'transformers', 'prefect', 'prefect_dask', 'distributed', 'matplotlib'}; "
        "print('loaded:', sorted(heavy & sys.modules.keys())); sys.exit(status)"
    )
    command = [sys.executable, "-c", code, "report", str(recorded_run(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("loaded: []\n"), done.stdout
