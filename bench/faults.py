"""Runs the tests of each fault that the project promises to survive, and writes the results into the page of faults.

    python -m bench.faults [ROW ...] [--timeout 3600] [--page bench/results/faults.md]

The page's table is what is run: for each fault the words for pytest. Without ROW, all rows are run. A row that is not
run keeps its result. Rows whose tests need ranks take at least half a minute each on two idle cores.
"""

import shlex
import subprocess
import sys
import tempfile
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from bench.harness import options
from prefect_rlhf.rlhf_tasks.system.failpoints import Point

ROOT = Path(__file__).parents[1]
COLUMNS = ["#", "fault", "expected", "tests", "seen"]
POINTS = "| name | process | what has happened by then |\n|---|---|---|\n"


def result_of(tests: str, timeout_s: float) -> str:
    """What became of the tests that pytest finds by some words."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", f"--junitxml={report}"]
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [*command, *shlex.split(tests)], cwd=ROOT, stdout=subprocess.DEVNULL, timeout=timeout_s
            )
        if not report.exists():
            return "**no end**"
        cases = [
            case
            for case in ElementTree.parse(report).getroot().iter("testcase")
            if case.find("skipped") is None
        ]
    failed = [
        str(case.get("name"))
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    counts = f"{len(cases)} passed"
    if failed or not cases:
        counts = f"**{len(failed)} of {len(cases)} failed**: {', '.join(failed)}"
    seconds = sum(float(case.get("time", 0)) for case in cases)
    return f"{counts} ({seconds:.0f} s, {datetime.now(UTC):%Y-%m-%d})"


def rows_of(page: str) -> dict[str, list[str]]:
    """Number of a fault -> its cells."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {cells[0]: cells for cells in lines if len(cells) == len(COLUMNS) and cells != COLUMNS}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("rows", nargs="*", help="numbers of faults")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for the tests of a row")
    parser.add_argument("--page", type=Path, default=ROOT / "bench" / "results" / "faults.md")
    arguments = parser.parse_args()
    rows = rows_of(arguments.page.read_text(encoding="utf-8"))
    if unknown := set(arguments.rows) - set(rows):
        parser.error(f"the page has no rows {', '.join(sorted(unknown))}")
    for number in arguments.rows or rows:
        *others, tests, _ = rows[number]
        seen = result_of(tests.strip("`"), arguments.timeout)
        print(f"{number}: {others[1]}: {seen}", flush=True)
        page = arguments.page.read_text(encoding="utf-8").partition(POINTS)[0]
        page = page.replace(f"| {' | '.join(rows[number])} |", f"| {' | '.join([*others, tests, seen])} |")
        points = [f"| `{point.label}` | {point.process} | {point.when} |\n" for point in Point]
        arguments.page.write_text(page + POINTS + "".join(points), encoding="utf-8")


if __name__ == "__main__":
    main()
