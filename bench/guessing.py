"""Shows that a policy learns to use what an environment answers: the guessing game of the examples.

    python -m bench.guessing [--seeds 0 1 2] [--folder runs/guessing-bench]

Each seed is a run of `prefect-rlhf run grpo --config deployments/examples/guessing-grpo.yaml` on a model with other
random weights. Told are the games won, greedily, by players that the training has not seen, before and after.
"""

import json
from pathlib import Path

from bench.harness import command, options
from deployments.examples import guessing

EXAMPLE = Path(guessing.__file__).with_name("guessing-grpo.yaml")


def won(folder: Path, seed: int) -> tuple[float, float]:
    """The share of games won before and after a run in `folder`."""
    guessing.write_game(folder, seed)
    overrides = {
        "models.actor": folder / "model",
        "data.train": folder / "train.jsonl",
        "evaluation.data": folder / "test.jsonl",
        "output_dir": folder,
        "name": "run",
        "seed": seed,
    }
    given = [f"{key}={value}" for key, value in overrides.items()]
    command("run", "grpo", "--config", str(EXAMPLE), *given)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    shares = [line["eval/reward"] for line in lines if "eval/reward" in line]
    return shares[0], shares[-1]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/guessing-bench"))
    given = parser.parse_args()
    figures = {seed: won(given.folder.absolute() / f"seed-{seed}", seed) for seed in given.seeds}
    print("seed  won before  won after")
    for seed, (before, after) in figures.items():
        print(f"{seed:4}  {before:10.3f}  {after:9.3f}")


if __name__ == "__main__":
    main()
