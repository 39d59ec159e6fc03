"""Games of OpenEnv, verifiers and a `rollout_func` are learned: a model guesses 1, 2 or 3, with a hint between.

    python -m bench.environments_learn [--kinds openenv verifiers trl] [--seeds 0 1 2] [--iterations 100]
                                       [--folder runs/environments-learn] [--json FILE]

The packages must be importable (`pip install openenv`, or a folder of theirs in PYTHONPATH; TRL up to 1.8). OpenEnv's
game is a server on loopback, verifiers' plays in the processes of environments, TRL's in those of agents; they are in
tests/rlhf_tasks/user_code/environment_kinds. The model has 100,000 random weights (deployments/examples/guessing.py).
Each run is `prefect-rlhf run grpo` on one rank: 256 games an iteration, 32 of a row.

    first, last  mean reward of the first and the last tenth of the iterations. Who reads the hint wins all games, who
                 does not wins 2 of 3 at most
    games/s      games in a second of generation, in the median
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from bench.engines_learn import rows_of
from bench.harness import command, options, write
from prefect_rlhf.deployments.examples.guessing import write_model
from prefect_rlhf.flows.demo import write_jsonl

GAMES = Path(__file__).parents[1] / "tests/rlhf_tasks/user_code/environment_kinds"
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{{ ' ' if message['role'] != 'user' }}{% endfor %}"
)
BATCH, START_S = 256, 120.0


@contextmanager
def played(kind: str, folder: Path) -> Iterator[dict[str, Any]]:
    """What a configuration says to play a kind's game, which can be played meanwhile."""
    if kind == "trl":
        file = GAMES / "guessing_rollout.py"
        yield {"agent": {"command": f"trl:{file}:plays"}, "rewards": [{"function": f"{file}:won"}]}
        return
    if kind == "verifiers":
        yield _environment(f"verifiers:{GAMES}/guessing_tasks.py:Guessing")
        return
    port = folder / "port"
    port.unlink(missing_ok=True)
    with subprocess.Popen([sys.executable, str(GAMES / "guessing_server.py"), str(port)]) as server:
        try:
            until_s = time.monotonic() + START_S
            while not port.exists() and server.poll() is None and time.monotonic() < until_s:
                time.sleep(0.05)
            yield _environment(f"openenv:http://127.0.0.1:{port.read_text()}")
        finally:
            server.kill()


def _environment(factory: str) -> dict[str, Any]:
    return {"environment": {"factory": factory, "max_turns": 2, "max_turn_tokens": 1}}


def model_of(folder: Path, seed: int) -> Path:
    """The model of a seed, which speaks in turns."""
    model = folder / f"model-{seed}"
    if not model.exists():
        write_model(model, seed)
        file = model / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return model


def document(
    folder: Path, name: str, game: dict[str, Any], model: Path, seed: int, iterations: int
) -> dict[str, Any]:
    return {
        **game,
        "type": "grpo",
        "name": name,
        "seed": seed,
        "models": {"actor": str(model)},
        "data": {"train": str(folder / f"{name}.jsonl"), "max_prompt_tokens": 16},
        "sampling": {"max_completion_length": 16},
        "batch_size": BATCH,
        "num_generations": 32,
        "num_mini_batches": 4,
        "total_iterations": iterations,
        "snapshot_every": iterations,
        "optimizer": {"learning_rate": 1.0e-3, "lr_scheduler_type": "linear"},
        "output_dir": str(folder / "runs"),
        "cluster": {"devices_per_host": 1},
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--kinds", nargs="+", default=["openenv", "verifiers", "trl"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--folder", type=Path, default=Path("runs/environments-learn"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, dict[str, float]] = {}
    for seed in arguments.seeds:
        model = model_of(folder, seed)
        for kind in arguments.kinds:
            name = f"{kind}-{seed}"
            with played(kind, folder) as game:
                file = folder / f"{name}.yaml"
                told = document(folder, name, game, model, seed, arguments.iterations)
                file.write_text(yaml.safe_dump(told))
                if "environment" in game:
                    command(
                        "rows", str(file), told["data"]["train"], "--count", "64", log=folder / "rows.log"
                    )
                else:
                    write_jsonl(Path(told["data"]["train"]), [{"prompt": "guess: "}] * 64)
                command("run", "grpo", "--config", str(file), log=folder / f"{name}.log")
            rows = rows_of(folder / "runs" / name)
            tenth = max(1, len(rows) // 10)
            figures[name] = {
                "first": fmean(row["reward"] for row in rows[:tenth]),
                "last": fmean(row["reward"] for row in rows[-tenth:]),
                "games/s": BATCH / median(row["time/actor_generate"] for row in rows),
            }
            cells = "  ".join(f"{what} {value:.3g}" for what, value in figures[name].items())
            print(f"{name:12} {cells}", flush=True)
            write(figures, arguments.json)


if __name__ == "__main__":
    main()
