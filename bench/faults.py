"""Runs the tests of each fault that the project promises to survive, and writes a page with the results.

    python -m bench.faults [ROW ...] [--timeout 3600] [--page bench/results/faults.md]

Without ROW, all rows are run. A row that is not run keeps its result on the page. Rows whose tests need ranks take at
least half a minute each on two idle cores.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from bench.harness import options
from rlhf_tasks.system.failpoints import Point

ROOT = Path(__file__).parents[1]
NOT_RUN = "not run"
NOTHING = "no test shows it"
CHECKPOINT, KILLS = "tests/rlhf_tasks/checkpoint/test_commits.py", "tests/rlhf_tasks/controller/test_kills.py"
RECOVERY, SNAPSHOTS = (
    "tests/rlhf_tasks/controller/test_recovery.py",
    "tests/rlhf_tasks/checkpoint/test_snapshots.py",
)
IDENTITY, ORDERS = "tests/flows/run/test_run_identity.py", "tests/flows/test_attempts.py"


class Fault(NamedTuple):
    """A row: what happens, the expected result, test files, a pytest -k expression, and what the tests leave out."""

    what: str
    expected: str
    file: str = ""
    tests: str = ""
    lacks: str = ""


class Case(NamedTuple):
    """A test that has run."""

    name: str
    passed: bool
    seconds: float


FAULTS = {
    "1": Fault("rank SIGKILL in generation", "R", KILLS, "generation"),
    "2": Fault("rank SIGKILL in reward", "R", KILLS, "reward-rank"),
    "3": Fault("rank SIGKILL in backward", "R", KILLS, "backward"),
    "4": Fault(
        "rank SIGKILL after the optimizer step",
        "no double step, R",
        KILLS,
        "optimizer_step or trained or answer",
    ),
    "5": Fault("rank SIGKILL in a reallocation", "no mixed versions, R", KILLS, "realloc"),
    "6": Fault("killed in a shard", "old commit, R", KILLS, "shard"),
    "7": Fault(
        "killed in journals or manifest, before the rename",
        "old commit, R",
        KILLS,
        "manifest or journals or metrics",
    ),
    "8": Fault("killed just after the rename", "new commit, R", KILLS, "renamed or committed"),
    "9": Fault("SIGSTOP inside a collective", "noticed by its deadline, R", RECOVERY, "stops"),
    "10": Fault(
        "SIGSTOP outside a collective",
        "noticed, R",
        "tests/rlhf_tasks/controller/test_attempt.py",
        "does_not_answer",
    ),
    "11": Fault("Dask scheduler killed", "R", ORDERS, "goes_on_by_itself or waits_for_it"),
    "12": Fault(
        "worker killed",
        "capacity restored",
        "tests/flows/cluster/test_cluster.py",
        "replaces_a_rank",
        "its nanny lives",
    ),
    "13": Fault(
        "the same fault again and again",
        "clear stop",
        "tests/rlhf_tasks/controller/test_attempt.py",
        "without_end",
        "it raises",
    ),
    "14": Fault("flow process SIGKILL", "workers gone, R", "tests/flows/test_killed_run.py", "killed"),
    "stopped": Fault(
        "every process of a run stopped (SIGSTOP), then flow process SIGKILL",
        "none left",
        "tests/flows/test_killed_run.py",
        "somebody_had_stopped",
    ),
    "15-17": Fault(
        "SIGTERM, Ctrl-C, cancelling",
        "clean stop, no orphans",
        "tests/flows/commands/test_training.py",
        "told_to_end",
    ),
    "18-20": Fault(
        "Prefect server down, its database locked or damaged",
        "training continues",
        "tests/flows/cluster/test_server.py tests/flows/commands/test_local_run.py "
        "tests/flows/view/test_prefect_api.py",
        "killed or data_base or dies_for_good or failure or busy",
    ),
    "21": Fault(
        "disk full in a shard", "path, bytes, last commit intact", SNAPSHOTS, "does_not_fit_on_its_disk"
    ),
    "22": Fault(
        "disk full in manifest or journal",
        "the same",
        f"{CHECKPOINT} {SNAPSHOTS}",
        "full_disk or manifest_that",
    ),
    "23": Fault("disk read-only", "the same", SNAPSHOTS, "read_only"),
    "24": Fault("files truncated", "refused, falls back", CHECKPOINT, "truncated or empty or longer"),
    "25": Fault("one bit at 100 random places of each file", "refused, falls back", CHECKPOINT, "bits"),
    "26": Fault(
        "manifest missing, of a future schema, hostile",
        "refused",
        CHECKPOINT,
        "missing or schema or manifest_names",
    ),
    "27": Fault("pickle beside a commit", "never opened", CHECKPOINT, "pickle"),
    "28": Fault(
        "every commit corrupt, or all gone", "stops, nothing starts again", CHECKPOINT, "no_commit or lost"
    ),
    "29": Fault(
        "another model or configuration at resume", "refused with the difference", IDENTITY, "model or change"
    ),
    "30": Fault("another layout at resume", "equal", SNAPSHOTS, "into_any_layout"),
    "31-32": Fault(
        "NaN in loss or gradient, repeated",
        "skip, stop",
        "tests/rlhf_tasks/algorithms/shared/test_schedule.py",
        "",
    ),
    "33": Fault(
        "bad rows and files",
        "file:line",
        "tests/rlhf_tasks/data/test_dataset.py",
        "",
        "refused; with `on_bad_row: skip` left out and listed (tests/rlhf_tasks/algorithms/test_examples.py)",
    ),
    "34": Fault("data changed before resume", "refused unless accepted", IDENTITY, "data"),
    "35": Fault(
        "rewards that raise, hang, exit", "contained, named", "tests/rlhf_tasks/user_code/test_rewards.py", ""
    ),
    "36": Fault(
        "reward server fails or redirects", "bounded", "tests/rlhf_tasks/user_code/test_service.py", ""
    ),
    "37": Fault("rank out of memory", "hint", "tests/rlhf_tasks/rank/test_plan_nodes.py", "memory"),
    "38": Fault(
        "a configuration too large for memory", "refused", "tests/flows/run/test_prepare.py", "does_not_fit"
    ),
    "39": Fault("port in use", "another, or waits", "tests/flows/cluster/test_server.py", "port"),
    "40": Fault("two runs on one folder", "refused", "tests/flows/run/test_run_folder.py", "only_one_run"),
    "41": Fault("clock jumps a day", "no timeout", "tests/flows/test_clock.py", ""),
    "42": Fault(
        "YAML bombs, unknown keys, NaN", "refused", "tests/rlhf_tasks/config/test_hostile_config.py", ""
    ),
    "43": Fault("path traversal, links", "refused", CHECKPOINT, "link or names_nothing_but"),
    "44": Fault(
        "many iterations",
        "memory flat",
        "tests/flows/run/test_training.py",
        "nothing_is_kept",
        "memory and file descriptors over many iterations: docs/measured.md",
    ),
    "failpoints": Fault("rank or controller killed at any failpoint", "R", KILLS),
    "flow": Fault("flow process killed at any failpoint", "resumed, R", "tests/flows/test_flow_kills.py"),
    "random": Fault(
        "server, flow, worker or reward process killed, five times a run, in ten runs",
        "R",
        "tests/flows/test_random_kills.py",
        "",
    ),
}
"""R: the run continues, and its final weights, moments and metrics are bit-equal to those of an undisturbed run."""


def outcomes(rows: Sequence[str], timeout_s: float) -> Iterator[tuple[str, str]]:
    """(row, result and date) for each row. Rows with the same files share a process."""
    of_file: dict[str, list[str]] = {}
    for number in rows:
        fault = FAULTS[number]
        if fault.file:
            of_file.setdefault(fault.file, []).append(number)
        else:
            yield number, fault.lacks or NOTHING
    for file, numbers in of_file.items():
        words = [FAULTS[number].tests for number in numbers]
        cases = _run(file, " or ".join(words) if all(words) else "", timeout_s)
        for number in numbers:
            yield number, _said(FAULTS[number], cases)


def _run(files: str, words: str, timeout_s: float) -> list[Case] | None:
    """Run the tests that match the -k expression `words` in some files; None if they did not finish in time."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "not gpu",
            f"--junitxml={report}",
            *files.split(),
        ]
        with suppress(subprocess.TimeoutExpired):
            subprocess.run([*command, "-k", words], cwd=ROOT, stdout=subprocess.DEVNULL, timeout=timeout_s)
        if not report.exists():
            return None
        found = ElementTree.parse(report).getroot().iter("testcase")
        return [
            Case(
                f"{case.get('name')}",
                case.find("failure") is None and case.find("error") is None,
                float(case.get("time", 0)),
            )
            for case in found
            if case.find("skipped") is None
        ]


def _said(fault: Fault, cases: list[Case] | None) -> str:
    if cases is None:
        return "**no end**"
    wanted = [case for case in cases if any(word in case.name for word in fault.tests.split(" or "))]
    failed = [case.name for case in wanted if not case.passed]
    counts = f"{len(wanted)} passed"
    if failed or not wanted:
        counts = f"**{len(failed)} of {len(wanted)} failed**: {', '.join(failed)}"
    lacks = f"; {fault.lacks}" if fault.lacks else ""
    return f"{counts} ({sum(c.seconds for c in wanted):.0f} s, {datetime.now(UTC):%Y-%m-%d}){lacks}"


def page(seen: Mapping[str, str]) -> str:
    """The page's Markdown: the table of faults with the results, and the table of failpoints."""
    rows = [
        f"| {number} | {fault.what} | {fault.expected} | {_named(fault)} | {seen.get(number, NOT_RUN)} |"
        for number, fault in FAULTS.items()
    ]
    points = [f"| `{point.label}` | {point.process} | {point.when} |" for point in Point]
    return "\n".join([_HEAD, *rows, _POINTS, *points, ""])


def _named(fault: Fault) -> str:
    chosen = f" -k '{fault.tests}'" if fault.tests else ""
    return f"`{fault.file}{chosen}`" if fault.file else ""


_HEAD = """# Faults

Written by `python -m bench.faults`, which runs the tests of each fault. *R*: the run continues, and its final
weights, moments and metrics are bit-equal to those of an undisturbed run, on CPUs. A row without a test, or that was
not run, promises nothing. docs/running.md has the summary.

| # | fault | expected | tests | seen |
|---|---|---|---|---|"""
_POINTS = """
## Failpoints

`PREFECT_RLHF_FAILPOINT=NAME:ACTION[@rankN][@iterN][@genN][@attemptN]` makes a process die (`kill`), stop, fail
(`raise`, `full`) or wait (`delay=S`) at one of these places (rlhf_tasks/system/failpoints.py).
tests/rlhf_tasks/controller/test_kills.py kills ranks and controller at each.

| name | process | what has happened by then |
|---|---|---|"""


def known(path: Path) -> dict[str, str]:
    """Row -> its result on the page."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    cells = [[cell.strip() for cell in line.split(" | ")] for line in lines if line.startswith("| ")]
    return {row[0].removeprefix("| "): row[-1].removesuffix(" |") for row in cells if len(row) == 5}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("rows", nargs="*", choices=[*FAULTS, []], help="numbers of faults")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for the tests of a file")
    parser.add_argument("--page", type=Path, default=ROOT / "bench" / "results" / "faults.md")
    arguments = parser.parse_args()
    for number, seen in outcomes(arguments.rows or list(FAULTS), arguments.timeout):
        print(f"{number}: {FAULTS[number].what}: {seen}", flush=True)
        arguments.page.write_text(page({**known(arguments.page), number: seen}), encoding="utf-8")


if __name__ == "__main__":
    main()
