"""GRPO of SmolLM2-135M-Instruct with a calculator beside GRPO without one: products of two numbers from 11 to 99.

    python -m prefect_rlhf.deployments.examples.smollm2 runs/smollm2    (its packages: see its first lines)
    python -m bench.tools_learn [--made runs/smollm2] [--seeds 0 1 2] [--folder DIR] [--json FILE] [key.sub=value ...]

Each run is deployments/examples/smollm2-tools.yaml on one rank, with the seed named. Without the tool it has the same
questions, whose example is answered without a call. Overrides at the end of the command line are for every run. A run
that has ended is not made again, so that a bench can be made in pieces.

    before, after  greedy answers to the 100 held-out questions that are right, of 1, before and after training
    calls          of a response, and those that are malformed, in the first and the last iteration
    seconds        of an iteration, in the median
"""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from bench.engines_learn import rows_of
from bench.harness import command, options, write
from prefect_rlhf.deployments import examples
from prefect_rlhf.flows.demo import write_jsonl

EXAMPLE = Path(examples.__file__).parent / "smollm2-tools.yaml"
SETS = ("products-train", "products-test")


def plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose example is answered at once."""
    kept = [each for each in row["prompt"] if each["role"] in ("user", "assistant") and "content" in each]
    return {**row, "prompt": kept}


def write_plain(made: Path, folder: Path) -> None:
    for name in SETS:
        lines = (made / f"{name}.jsonl").read_text().splitlines()
        write_jsonl(folder / f"{name}.jsonl", [plain(json.loads(line)) for line in lines])


def overrides(made: Path, rows: Path, with_tool: bool) -> list[str]:
    without = ["tools=[]", "tool_format=null", "environment=null", "sampling.max_completion_length=16"]
    return [
        f"models.actor={made / 'model'}",
        f"data.train={rows / SETS[0]}.jsonl",
        f"evaluation.data={rows / SETS[1]}.jsonl",
        "cluster={devices_per_host: 1}",
        *([] if with_tool else without),
    ]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--made", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/tools-learn"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    made, folder = arguments.made.resolve(), arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write_plain(made, folder)
    figures: dict[str, dict[str, float]] = {}
    for seed in arguments.seeds:
        for way, rows in (("tool", made), ("without", folder)):
            name = f"{way}-{seed}"
            run = folder / "runs" / name
            if not (run / "summary.json").is_file():
                where = [f"seed={seed}", f"name={name}", f"output_dir={folder / 'runs'}"]
                given = [*overrides(made, rows, way == "tool"), *where, *arguments.overrides]
                command("run", "grpo", "--config", str(EXAMPLE), *given, log=folder / f"{name}.log")
            figures[name] = summary(run)
            cells = "  ".join(f"{what} {value:.3g}" for what, value in figures[name].items())
            print(f"{name:10} {cells}", flush=True)
            write(figures, arguments.json)


def summary(run: Path) -> dict[str, float]:
    """The bench's figures of a run."""
    before, *rows = rows_of(run)
    first, last = rows[0], rows[-1]
    figures = {"before": before["eval/reward"], "after": last["eval/reward"]}
    if "tools/calls" in first:
        figures |= {
            f"{what} {when}": row[f"tools/{what}"]
            for when, row in (("first", first), ("last", last))
            for what in ("calls", "malformed")
        }
    return figures | {"s iteration": median(row["time/iteration"] for row in rows)}


if __name__ == "__main__":
    main()
