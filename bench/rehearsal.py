"""Compares a rehearsal with the run that it rehearses: PPO on the demo's models, priced by a profile measured here.

    python -m bench.rehearsal [--ranks 2] [--iterations 12] [--rounds 1] [--json FILE]

Measures a profile (`prefect-rlhf profile`), rehearses PPO with it and without noise, then runs the same configuration
(`prefect-rlhf run ppo`). Every answer has the maximum length, so that planned and real work are the same. The first
WARM_UP iterations of the run are left out. A round is a profile, a run and a rehearsal; the machine should be idle.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

import yaml

from bench.harness import command, options, write
from bench.plan_runs import ppo_of, write_models
from flows.commands.rehearsals import rehearsable, rehearsed
from planner.report import figures_source
from rlhf_tasks.algorithms.configurations import load_config
from rlhf_tasks.rehearsal.assumptions import Machines

WARM_UP = 2
SIZES = (64, 16, 32)  # sequences of an iteration, tokens of a prompt and of a response
TARGET = 0.20


def measured_s(run_folder: Path) -> float:
    """Mean seconds per iteration of a run after the warm-up, by the clocks of its ranks."""
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    return fmean(json.loads(line)["time/iteration"] for line in lines[WARM_UP:])


def one_round(folder: Path, ranks: int, iterations: int) -> dict[str, float | str]:
    """Seconds per iteration: planned, rehearsed and measured."""
    write_models(folder)
    config = ppo_of(folder, ranks, *SIZES, total_iterations=iterations, name="measured")
    file = folder / "ppo.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True) | {"type": "ppo"}))
    command("profile", "--config", str(file))
    # Before the run: what a run finds of its calls corrects the prices of those after it.
    run = rehearsable(load_config(file))
    found = rehearsed(run, hours=24.0, machines=Machines(), noise=0.0, seed=0, leaps=False)
    command("run", "ppo", "--config", str(file))
    first, last = found.story.commits[0], found.story.commits[-1]  # a commit may cover several iterations
    return {
        "planned_s": run.costs.iteration_s,
        "rehearsed_s": (last.at_s - first.at_s) / (last.step - first.step),
        "measured_s": measured_s(folder / "runs" / "measured"),
        "priced_by": figures_source(run.problem.model),
    }


def report(rounds: Sequence[dict[str, float | str]]) -> dict[str, object]:
    """Print each round, and the median of the rounds' differences."""
    off = [float(r["rehearsed_s"]) / float(r["measured_s"]) - 1 for r in rounds]
    for figures, difference in zip(rounds, off, strict=True):
        print(
            f"planned {figures['planned_s']:.3f} s, rehearsed {figures['rehearsed_s']:.3f}, measured "
            f"{figures['measured_s']:.3f}: rehearsal {difference:+.1%} ({figures['priced_by']})"
        )
    print(f"median difference {median(off):+.1%}, target at most {TARGET:.0%} either way")
    return {"rounds": list(rounds), "median_difference": median(off)}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rounds = []
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(one_round(Path(folder), arguments.ranks, arguments.iterations))
    write(report(rounds), arguments.json)


if __name__ == "__main__":
    main()
