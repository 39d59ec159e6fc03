"""GRPO with vLLM beside the built-in engine: the same task, configuration and seeds, in turn.

    python -m bench.engines_learn --model runs/smollm2/model --rows runs/smollm2/train.jsonl
                                  [--engines builtin vllm] [--seeds 0 1 2] [--iterations 8] [--folder DIR]
                                  [--python PYTHON] [--json FILE] [key.sub=value ...]

The model is any folder (SmolLM2-135M-Instruct: deployments/examples/smollm2.py), the rows any prompts; the reward is
the share of vowels among the letters of an answer. Each run is `prefect-rlhf run grpo` on one rank: 32 answers of at
most 24 tokens, all weights trained. Overrides at the end of the command line are for every run. A run whose folder
has all its iterations is not made again, so that a bench can be made in pieces.

    reward     means of the first and the last quarter of the iterations; a right engine moves it as the other does
    kl         nats a token between the policy that drew and the trainer's own, mean and most over the iterations
    weights    their mean, and the share that the correction cut
    seconds    medians over the iterations after the first: all, generation (with the hand-over), training
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from bench.harness import command, options, write
from prefect_rlhf.rlhf_tasks.config.generation import default_python

REWARD = '''"""The reward of the bench."""


def vowels(completions, **_):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    letters = [[c for c in text.lower() if c.isalpha()] for text in texts]
    return [sum(c in "aeiou" for c in each) / max(1, len(each)) for each in letters]
'''


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run's iterations; none where it has not begun."""
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def document(arguments: Any, folder: Path, name: str, engine: str, seed: int) -> dict[str, Any]:
    generation = {"engine": engine, **({"python": arguments.python} if engine == "vllm" else {})}
    return {
        "type": "grpo",
        "name": name,
        "seed": seed,
        "dtype": "float32",
        "models": {"actor": str(arguments.model.resolve())},
        "data": {"train": str(arguments.rows.resolve()), "max_prompt_tokens": 160},
        "sampling": {"max_completion_length": 24},
        "rewards": [{"function": f"{folder}/rewards.py:vowels"}],
        "generation": generation,
        "batch_size": 32,
        "num_generations": 8,
        "total_iterations": arguments.iterations,
        "optimizer": {"learning_rate": 2.0e-5},
        "snapshot_every": arguments.iterations,
        "output_dir": str(folder / "runs"),
        "cluster": {"devices_per_host": 1},
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The bench's figures of a run."""
    quarter = max(1, len(rows) // 4)

    def seconds(ending: str) -> float:
        return median(
            sum(value for key, value in row.items() if key.startswith("time/") and key.endswith(ending))
            for row in rows[1:] or rows
        )

    kl = [row["importance/kl"] for row in rows if "importance/kl" in row]
    figures = {
        "reward first": fmean(row["reward"] for row in rows[:quarter]),
        "reward last": fmean(row["reward"] for row in rows[-quarter:]),
        "s iteration": median(row["time/iteration"] for row in rows[1:] or rows),
        "s generation": seconds("_generate"),
        "s training": seconds("_train"),
    }
    if kl:
        figures |= {
            "kl mean": fmean(kl),
            "kl most": max(kl),
            "weight": fmean(row["importance/mean"] for row in rows),
            "cut": fmean(row["importance/cut_ratio"] for row in rows),
        }
    return figures


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--engines", nargs="+", default=["builtin", "vllm"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path("runs/engines-learn"))
    parser.add_argument("--python", default=default_python(), help="of the environment that has vLLM")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rewards.py").write_text(REWARD)
    figures: dict[str, dict[str, float]] = {}
    for seed in arguments.seeds:
        for engine in arguments.engines:
            name = f"{engine}-{seed}"
            run = folder / "runs" / name
            if len(rows_of(run)) < arguments.iterations:
                file = folder / f"{name}.yaml"
                file.write_text(yaml.safe_dump(document(arguments, folder, name, engine, seed)))
                command(
                    "run", "grpo", "--config", str(file), *arguments.overrides, log=folder / f"{name}.log"
                )
            figures[name] = summary(rows_of(run))
            cells = "  ".join(f"{what} {value:.4g}" for what, value in figures[name].items())
            print(f"{name:12} {cells}", flush=True)
            write(figures, arguments.json)


if __name__ == "__main__":
    main()
