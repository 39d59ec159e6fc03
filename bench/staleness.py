"""Compares PPO on the demo's task under staleness 0 to 4: accuracy, seconds, importance weights.

    python -m bench.staleness [--seeds 0 1 2] [--staleness 0 1 2 3 4] [--iterations N] [--folder runs/staleness]
                              [--json FILE]

All runs of a seed start from its SFT model and share its reward model and Prefect server. Each has the heuristic's
plan. Prints a row for each run, then the table of bench/results/learning.md: means over the seeds, and their range.

    accuracy    exact match of greedy answers on held-out words; before is that of the SFT model
    seconds     of the whole run. Four ranks share one machine here, so running ahead cannot gain time
    staleness   of the samples, in train_steps: the mean over the run
    weight      importance weight of a token: mean over the run
    cut         share of the tokens whose weight the cap cuts, in the worst iteration
    effective   share of the tokens that equal weights would need for the same variance, in the worst iteration
"""

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from prefect import flow

from bench.harness import options, write
from flows.pipeline import Demo, demo_at, make_models, measure

Row = dict[str, float]


async def run_seed(demo: Demo, staleness: Sequence[int], iterations: int | None) -> list[Row]:
    """A row for each staleness. iterations: of PPO, where not the demo's."""
    policy = await make_models(demo)
    changes: dict[str, Any] = {"plan": "heuristic"}
    if iterations is not None:
        changes["total_iterations"] = iterations
    before = await measure(demo, policy.roles()["actor"].folder, "before")
    rows = []
    for lag in staleness:
        name = f"staleness-{lag}"
        config = type(policy).model_validate(
            {**policy.model_dump(), **changes, "name": name, "staleness": lag}
        )
        started_s = time.monotonic()
        trained = await demo.run(config)
        row = {"seed": demo.seed, "staleness": lag, "before": before, "seconds": time.monotonic() - started_s}
        row["accuracy"] = await measure(demo, trained["model"], name)
        rows.append(row | weights(demo.folder / "stages" / name))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def weights(run: Path) -> Row:
    """How stale the samples of a run were and what their importance weights were, from its metrics."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    def column(ending: str) -> list[float]:
        return [value for line in lines for key, value in line.items() if key.endswith(ending)]

    if not column("importance/mean"):
        return {"stale": 0.0, "weight": 1.0, "cut": 0.0, "effective": 1.0}
    return {
        "stale": mean(column("staleness/mean")),
        "weight": mean(column("importance/mean")),
        "cut": max(column("importance/cut_ratio")),
        "effective": min(column("importance/effective")),
    }


def table(rows: Sequence[Row]) -> str:
    """The rows of all seeds as a table in Markdown."""
    columns = ("accuracy", "seconds", "stale", "weight", "cut", "effective")
    lines = ["| staleness | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for lag in sorted({row["staleness"] for row in rows}):
        cells = [f"{lag:g}"]
        for column in columns:
            found = [row[column] for row in rows if row["staleness"] == lag]
            cells.append(f"{mean(found):.3g} ({min(found):.3g} to {max(found):.3g})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


async def all_rows(folder: Path, seed: int, staleness: Sequence[int], iterations: int | None) -> list[Row]:
    """All rows of one seed, with a new Prefect server and cluster."""
    with demo_at(folder, seed) as demo:

        @flow(name="bench-staleness", persist_result=False)
        async def one_seed() -> list[Row]:
            return await run_seed(demo, staleness, iterations)

        return await one_seed()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--iterations", type=int, help="of PPO; default: the demo's")
    parser.add_argument("--folder", type=Path, default=Path("runs/staleness"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[Row] = []
    for seed in arguments.seeds:
        folder = arguments.folder / f"seed-{seed}"
        rows += asyncio.run(all_rows(folder, seed, arguments.staleness, arguments.iterations))
        write(rows, arguments.json)
    print(table(rows))


if __name__ == "__main__":
    main()
