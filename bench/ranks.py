"""Compares what `plan: auto` chooses, one CPU rank of all threads or several of fewer, with real runs of each.

    python -m bench.ranks [--works ppo grpo sft] [--models tiny] [--dtypes float32] [--repeats 2] [--iterations 6]

The works are those of bench/vs_trl.py. For each, `prefect-rlhf profile` measures the models on every number of ranks
that divides this machine's cores. Then a run may choose among them, and runs that may not take turns: one for each
number of ranks, with the profile of that number alone. Prints what was planned and measured for each number, seconds
of an iteration, and how much slower the chosen number is than the fastest one: 1.00 where the choice is right.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import yaml

from bench.vs_trl import TRL, Work, child_environment, configuration, works
from flows.cluster.this_machine import cores_here

SCRIPT = Path(sys.executable).with_name("prefect-rlhf")
STATED = "cluster.devices_per_host={}"
CHOOSE = ("plan=auto",)


def ran(work: Work, folder: Path, *command: str) -> str:
    """What a command of ours prints."""
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(configuration(work, folder)))
    kind = [work.algorithm.replace("_", "-")] if command[0] == "run" else []
    ended = subprocess.run(
        [SCRIPT, command[0], *kind, "--config", config, *command[1:]],
        env=child_environment(),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        sys.exit(f"{work}: {' '.join(command)} failed\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return ended.stdout


def run_of(work: Work, profiles: Path, ranks: int | None) -> tuple[int, float, float]:
    """(ranks, planned, measured seconds of an iteration after the first) of a run.

    profiles  folder of the profiles that its plan is made with
    ranks     None: its plan chooses
    """
    with tempfile.TemporaryDirectory(dir=work.folder) as folder:
        shutil.copytree(profiles, Path(folder, "runs", "profiles"))
        ran(work, Path(folder), "run", *(CHOOSE if ranks is None else ["plan=auto", STATED.format(ranks)]))
        (run,) = (path.parent for path in Path(folder).glob("runs/*/summary.json"))
        summary = json.loads((run / "summary.json").read_text())
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        plan = json.loads((run / "plan.json").read_text())
        planned = summary["planned_and_measured"]["iteration"]["planned"]
        return plan["devices_per_host"], planned, median(row["time/iteration"] for row in rows[1:])


def compare(work: Work, counts: Sequence[int], repeats: int) -> str:
    """A line for each number of ranks, and one about the choice."""
    home = Path(work.folder)
    alone = {count: home / f"{work.algorithm}-{work.dtype}-profiles-{count}" for count in counts}
    every = home / f"{work.algorithm}-{work.dtype}-profiles"
    for count, kept in alone.items():
        with tempfile.TemporaryDirectory(dir=work.folder) as folder:
            ran(work, Path(folder), "profile", STATED.format(count))
            shutil.copytree(Path(folder, "runs", "profiles"), kept)
        shutil.copytree(kept, every, dirs_exist_ok=True)
    chosen, _, _ = run_of(work, every, None)
    found = [(count, *run_of(work, alone[count], count)[1:]) for _ in range(repeats) for count in counts]
    lines, measured = [f"{work}"], {}
    for count in counts:
        planned, each = found[counts.index(count)][1], [took for n, _, took in found if n == count]
        measured[count] = median(each)
        spread = f"{min(each):.3f} to {max(each):.3f}"
        lines.append(f"  {count} ranks: planned {planned:.3f} s, measured {measured[count]:.3f} s ({spread})")
    worse = measured[chosen] / min(measured.values())
    return "\n".join([*lines, f"  plan: auto takes {chosen} ranks: {worse:.2f} times the fastest"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--works", nargs="+", choices=list(TRL), default=["ppo", "grpo", "sft"])
    parser.add_argument("--models", nargs="+", default=["tiny"])
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--lengths", nargs="+", default=["full"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--iterations", type=int, default=6, help="measured in each run, after one that is not"
    )
    arguments = parser.parse_args()
    cores = cores_here()
    counts = [count for count in range(cores, 0, -1) if cores % count == 0]
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        for work in works(arguments, Path(folder)):
            print(compare(work, counts, arguments.repeats), flush=True)


if __name__ == "__main__":
    main()
